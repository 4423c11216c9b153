//! Randomness from the scenario's seed: one stream for each purpose and place, so that one more packet on one link does
//! not change what another link does.

use oorandom::Rand64;

/// What a stream of random numbers is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Purpose {
    /// How long computing takes.
    Compute = 1,
    /// Which iterations are slow, and when ranks fail.
    Straggler = 2,
    /// Loss, duplicates, reordering and damage on a link.
    Impairment = 3,
    /// When background traffic bursts and links are slow.
    Weather = 4,
    /// Damage to the aggregator's memory.
    Damage = 5,
    /// The shape of a soak test's scenario.
    Shape = 6,
}

/// A stream. Only integers and products of floats: logarithms differ between platforms.
#[derive(Clone, Copy, Debug)]
pub struct Random(Rand64);

impl Random {
    /// The stream for a purpose at a place.
    #[must_use]
    pub fn new(seed: u64, purpose: Purpose, place: u64) -> Random {
        let place = place.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ purpose as u64;
        Random(Rand64::new(u128::from(seed) << 64 | u128::from(place)))
    }

    /// Any number.
    pub fn any(&mut self) -> u64 {
        self.0.rand_u64()
    }

    /// A number below `n`; 0 if `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        if n == 0 { 0 } else { self.0.rand_range(0..n) }
    }

    /// A number from `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below((high.saturating_sub(low)).saturating_add(1))
    }

    /// A number in `low..high`.
    pub fn uniform(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.0.rand_float()
    }

    /// Yes, with this probability. Without a draw where the answer is certain.
    pub fn chance(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.0.rand_float() < probability
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reports and replays name seeds, so these numbers must never change.
    #[test]
    fn streams_are_what_they_always_were() {
        let mut random = Random::new(1, Purpose::Compute, 0);
        let first: Vec<u64> = (0..3).map(|_| random.below(1_000_000)).collect();
        assert_eq!(first, FIRST);
        let mut other = Random::new(1, Purpose::Compute, 1);
        assert_ne!(first, (0..3).map(|_| other.below(1_000_000)).collect::<Vec<_>>());
    }

    const FIRST: [u64; 3] = [428_071, 809_747, 94_482];

    #[test]
    fn ranges_hold() {
        let mut random = Random::new(2, Purpose::Shape, 0);
        for _ in 0..1000 {
            assert!((3..=5).contains(&random.between(3, 5)));
            assert!((0.5..2.0).contains(&random.uniform(0.5, 2.0)));
        }
        assert_eq!(random.below(0), 0);
        assert!(!random.chance(0.0) && random.chance(1.0));
    }
}
