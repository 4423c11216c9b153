//! Bits of the header's fourth byte.

/// Declares the flags, and the list of them.
macro_rules! flags {
    ($($(#[$doc:meta])* $name:ident = $bit:literal;)*) => {
        $($(#[$doc])* pub const $name: u8 = 1 << $bit;)*
        /// Every flag with its name.
        pub const NAMES: &[(u8, &str)] = &[$(($name, stringify!($name)),)*];
    };
}

flags! {
    /// Answer: the payload is the result of `want`.
    RESULT = 0;
    /// Request: the payload is a partial sum of several ranks (from a switch or a lower level). Answer: it is a switch's,
    /// which speaks for itself alone; a result with it is a copy for a rank that did not ask.
    PARTIAL = 1;
    /// Request: sent before; a switch passes it on untouched (protocol-rules F15).
    RETRANSMIT = 2;
    /// Answer: the request met congestion (IP ECN field was CE).
    ECN_ECHO = 3;
    /// A gradient held NaN or infinity: the sender's (request), or that of rank `rank` (answer).
    NON_FINITE = 4;
    /// `lanes` lanes follow the header.
    PAYLOAD = 5;
    /// Answer without a result: a chunk is being redone; the tag field names it (see [`super::Redo`]).
    REDO = 6;
    /// Answer without a result, from above a node whose ranks are one rank of its parent's job: the bitmap has the root's
    /// ranks, not those of the node.
    ABOVE = 7;
}
