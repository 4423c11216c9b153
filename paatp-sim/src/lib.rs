//! A packet network in virtual time that runs the real workers and the real aggregator.
