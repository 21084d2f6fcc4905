//! The seeded generator behind every decision of a run.
//!
//! SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014): its
//! output function is a bijection of 64 bits, which [`crate::oracle`] uses too. The same seed gives
//! the same numbers on every machine. Not for secrets.

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64's output function: spreads `x` over all 64 bits, one to one.
pub fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The inverse of [`mix`].
pub fn unmix(mut x: u64) -> u64 {
    x = (x ^ (x >> 31) ^ (x >> 62)).wrapping_mul(0x3196_42b2_d24d_8ec3);
    x = (x ^ (x >> 27) ^ (x >> 54)).wrapping_mul(0x96de_1b17_3f11_9089);
    x ^ (x >> 30) ^ (x >> 60)
}

/// A stream of seeded numbers.
#[derive(Clone, Debug)]
pub struct Chance(u64);

impl Chance {
    /// The stream of `seed`.
    pub fn new(seed: u64) -> Chance {
        Chance(mix(seed.wrapping_add(STEP)))
    }

    /// A stream of its own, so that what it decides does not depend on who else draws when.
    pub fn fork(&mut self) -> Chance {
        Chance(self.draw())
    }

    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.draw()) * u128::from(bound)) >> 64) as u64
    }

    /// A number from `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// A number from 1 to `high`, small ones as likely as large ones (by magnitude).
    pub fn magnitude(&mut self, high: u64) -> u64 {
        let bits = self.below(u64::from(high.ilog2()) + 1);
        let low = 1 << bits;
        self.between(low, high.min(low * 2 - 1))
    }

    /// True once in `count` times.
    pub fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }

    /// True `permille` times in a thousand.
    pub fn permille(&mut self, permille: u32) -> bool {
        permille > 0 && self.below(1000) < u64::from(permille)
    }

    /// One of `choices`, which are not none.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unmix_inverts_mix() {
        let mut chance = Chance::new(1);
        for _ in 0..1000 {
            let x = chance.draw();
            assert_eq!(unmix(mix(x)), x);
        }
    }

    #[test]
    fn numbers_keep_their_bounds() {
        let mut chance = Chance::new(2);
        for high in 1..200 {
            assert!(chance.below(high) < high);
            assert!((1..=high).contains(&chance.magnitude(high)));
            assert!((7..=7 + high).contains(&chance.between(7, 7 + high)));
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_numbers() {
        let draw = |seed| {
            let mut chance = Chance::new(seed);
            (0..100).map(|_| chance.draw()).collect::<Vec<_>>()
        };
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
    }
}
