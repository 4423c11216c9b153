//! Serial numbers of chunks: 32 bits, wrapping.

/// A job's chunk counter. Compared only by distance: `a` is *before* `b` when walking forward from `a` reaches `b` in
/// fewer than 2^31 steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Seq(pub u32);

impl Seq {
    /// Steps forward from `origin` to `self`, modulo 2^32.
    #[inline(always)]
    #[must_use]
    pub const fn since(self, origin: Seq) -> u32 {
        self.0.wrapping_sub(origin.0)
    }

    /// `self` lies behind `other`.
    #[inline(always)]
    #[must_use]
    pub const fn is_before(self, other: Seq) -> bool {
        (self.0.wrapping_sub(other.0) as i32) < 0
    }

    /// The number `steps` further on.
    #[inline(always)]
    #[must_use]
    pub const fn plus(self, steps: u32) -> Seq {
        Seq(self.0.wrapping_add(steps))
    }

    /// The number `steps` further back.
    #[inline(always)]
    #[must_use]
    pub const fn minus(self, steps: u32) -> Seq {
        Seq(self.0.wrapping_sub(steps))
    }

    /// The later of two numbers.
    #[inline(always)]
    #[must_use]
    pub const fn later(self, other: Seq) -> Seq {
        if self.is_before(other) { other } else { self }
    }

    /// The earlier of two numbers.
    #[inline(always)]
    #[must_use]
    pub const fn earlier(self, other: Seq) -> Seq {
        if self.is_before(other) { self } else { other }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_survives_the_wrap() {
        let last = Seq(u32::MAX);
        assert!(last.is_before(last.plus(1)));
        assert!(!last.plus(1).is_before(last));
        assert_eq!(last.plus(3).since(last), 3);
        assert_eq!(last.later(Seq(2)), Seq(2));
    }
}
