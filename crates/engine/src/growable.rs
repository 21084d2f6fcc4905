//! An array that is made longer while others read it, without a lock and without moving anything.
//!
//! It is a list of pieces, each written once. Whoever reads what was there at first pays nothing for it;
//! whoever reads what came later walks one step for each piece before. Callers lengthen it by half at
//! least, so that the pieces stay few.

use std::sync::OnceLock;

/// See the module's head.
pub(crate) struct Growable<T> {
    items: Box<[T]>,
    more: OnceLock<Box<Growable<T>>>,
}

impl<T> FromIterator<T> for Growable<T> {
    fn from_iter<I: IntoIterator<Item = T>>(items: I) -> Growable<T> {
        Growable { items: items.into_iter().collect(), more: OnceLock::new() }
    }
}

impl<T> Growable<T> {
    /// The item at `index`, if it is that long.
    #[inline]
    pub(crate) fn get(&self, mut index: usize) -> Option<&T> {
        let mut piece = self;
        loop {
            if let Some(item) = piece.items.get(index) {
                return Some(item);
            }
            index -= piece.items.len();
            piece = piece.more.get()?;
        }
    }

    /// How many items there are.
    pub(crate) fn len(&self) -> usize {
        self.items.len() + self.more.get().map_or(0, |more| more.len())
    }

    /// Makes it at least `len` items long.
    pub(crate) fn grow(&self, len: usize, mut item: impl FnMut() -> T) {
        let mut lacking = len.saturating_sub(self.items.len());
        let mut piece = self;
        while lacking > 0 {
            piece = piece.more.get_or_init(|| Box::new((0..lacking).map(|_| item()).collect()));
            lacking = lacking.saturating_sub(piece.items.len());
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn what_was_there_stays_where_it_was() {
        let array: Growable<u32> = [1, 2].into_iter().collect();
        let first: *const u32 = array.get(0).unwrap();
        assert_eq!(array.get(2), None);
        array.grow(5, || 3);
        array.grow(4, || 4);
        array.grow(6, || 5);
        let items: Vec<u32> = (0..array.len()).map(|index| *array.get(index).unwrap()).collect();
        assert_eq!(items, [1, 2, 3, 3, 3, 5]);
        assert_eq!(array.get(6), None);
        assert_eq!(first, array.get(0).unwrap() as *const u32);
    }

    #[test]
    fn an_empty_array_grows() {
        let array: Growable<u32> = std::iter::empty().collect();
        array.grow(1, || 7);
        assert_eq!((array.get(0), array.len()), (Some(&7), 1));
    }
}
