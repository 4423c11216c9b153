//! Numbers for generations: random, and none twice while anything may remember it.

use std::collections::{BTreeSet, VecDeque};

/// Generations that are remembered. Slots, acknowledgements and progress keep the number of whoever wrote them last; a
/// new generation with an old number would take those for its own. A number comes back after 65,536 others at the
/// earliest, and then with a chance of 2^-32 each time.
const REMEMBERED: usize = 1 << 16;

/// The numbers that were given out.
#[derive(Clone, Debug, Default)]
pub struct Generations {
    order: VecDeque<u32>,
    used: BTreeSet<u32>,
}

impl Generations {
    /// The next number from a random one: never 0 (an unused entry), none that is remembered.
    pub fn next(&mut self, random: u32) -> u32 {
        let mut number = random;
        // Ends: fewer numbers are remembered than there are.
        while number == 0 || self.used.contains(&number) {
            number = number.wrapping_add(1);
        }
        self.remember(number);
        number
    }

    /// A number that was given out before.
    pub fn remember(&mut self, number: u32) {
        if number == 0 || !self.used.insert(number) {
            return;
        }
        if self.order.len() >= REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.used.remove(&oldest);
        }
        self.order.push_back(number);
    }

    /// Those that are remembered, the oldest first.
    pub fn remembered(&self) -> impl Iterator<Item = u32> {
        self.order.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generations_are_never_zero_or_repeated() {
        let mut generations = Generations::default();
        assert_eq!(
            [0, 0, 1, u32::MAX, u32::MAX].map(|random| generations.next(random)),
            [1, 2, 3, u32::MAX, 4]
        );
    }

    #[test]
    fn memory_is_bounded() {
        let mut generations = Generations::default();
        for number in 1..=REMEMBERED as u32 + 10 {
            assert_eq!(generations.next(number), number);
        }
        assert_eq!((generations.order.len(), generations.used.len()), (REMEMBERED, REMEMBERED));
        assert_eq!(generations.next(1), 1, "forgotten by now");
        assert_eq!(generations.next(12), REMEMBERED as u32 + 11, "remembered, and all after it");
    }
}
