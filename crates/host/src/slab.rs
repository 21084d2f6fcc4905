//! A table of things in flight, each known by a small number that is used again when it is free.
//!
//! Deliberately absent: generations. Whoever puts a number where it may outlive its thing (a CQE, a
//! reply from another thread) removes the thing only when that number has come back.

pub(crate) struct Slab<T> {
    slots: Vec<Slot<T>>,
    free: u32,
    count: usize,
}

enum Slot<T> {
    Used(T),
    /// The next free slot, or `NONE`.
    Free(u32),
}

const NONE: u32 = u32::MAX;

impl<T> Slab<T> {
    pub(crate) const fn new() -> Slab<T> {
        Slab { slots: Vec::new(), free: NONE, count: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.count
    }

    pub(crate) fn insert(&mut self, value: T) -> u32 {
        self.count += 1;
        let index = self.free;
        if index == NONE {
            self.slots.push(Slot::Used(value));
            return u32::try_from(self.slots.len() - 1).expect("fewer than 2^32 things in flight");
        }
        let slot = &mut self.slots[index as usize];
        let Slot::Free(next) = *slot else { unreachable!("a used slot on the free list") };
        *slot = Slot::Used(value);
        self.free = next;
        index
    }

    /// # Panics
    /// If nothing has that number.
    pub(crate) fn remove(&mut self, index: u32) -> T {
        let slot = std::mem::replace(&mut self.slots[index as usize], Slot::Free(self.free));
        let Slot::Used(value) = slot else { panic!("removed twice") };
        self.free = index;
        self.count -= 1;
        value
    }

    pub(crate) fn at(&mut self, index: u32) -> Option<&mut T> {
        match self.slots.get_mut(index as usize) {
            Some(Slot::Used(value)) => Some(value),
            _ => None,
        }
    }

    pub(crate) fn values(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().filter_map(|slot| match slot {
            Slot::Used(value) => Some(value),
            Slot::Free(_) => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_used_again() {
        let mut slab = Slab::new();
        let (a, b) = (slab.insert('a'), slab.insert('b'));
        assert_eq!(slab.remove(a), 'a');
        assert_eq!(slab.at(a), None);
        assert_eq!(slab.at(b), Some(&mut 'b'));
        assert_eq!(slab.len(), 1);
        assert_eq!(slab.insert('c'), a);
        assert_eq!(slab.values().collect::<String>(), "cb");
    }
}
