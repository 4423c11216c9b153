//! The messages of P4Runtime, and its client and server, made from `paatp-user/proto` by `cargo xtask codegen`. The server's
//! side is for tests that play the switch.

#![allow(
    missing_docs,
    unused_qualifications,
    clippy::all,
    clippy::allow_attributes_without_reason,
    rustdoc::all,
    reason = "made by a program; the descriptions have the comments"
)]

/// `google.*`
pub mod google {
    /// `google.rpc`
    pub mod rpc {
        include!("messages/google.rpc.rs");
    }
}

/// `p4.*`
pub mod p4 {
    /// `p4.config.*`
    pub mod config {
        /// `p4.config.v1`
        pub mod v1 {
            include!("messages/p4.config.v1.rs");
        }
    }
    /// `p4.v1`
    pub mod v1 {
        include!("messages/p4.v1.rs");
    }
}
