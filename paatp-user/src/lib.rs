//! The library of the `paatp` program: loads and attaches the XDP engine ([`engine`]), keeps jobs and their members
//! ([`control`]), shows how they fare ([`telemetry`], [`page`]) and what they send ([`capture`]), manages them from elsewhere ([`client`]), takes part in a job as a worker ([`worker`]), and says what is
//! wrong with a machine ([`doctor`]).

pub mod capture;
pub mod cleanup;
pub mod cli;
pub mod client;
pub mod config;
pub mod control;
pub mod daemon;
pub mod doctor;
pub mod duration;
pub mod engine;
pub mod exit;
pub mod log;
pub mod look;
pub mod manual;
pub mod object;
pub mod page;
pub mod restart;
mod service;
pub mod settings;
mod signals;
pub mod sim;
pub mod switch;
pub mod telemetry;
pub mod worker;
