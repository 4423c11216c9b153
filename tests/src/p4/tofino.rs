//! The switch program for Tofino (`p4/paatp_tna.p4`): its types are checked and its meaning is taken from `p4test`.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::pipeline::Program;
use super::{built, digest, find, require, sources, version};

/// What chooses the chip in the headers of the architecture.
const TARGET: &str = "-D__TARGET_TOFINO__=1";

fn program() -> PathBuf {
    sources().join("paatp_tna.p4")
}

/// Runs a tool; what it said where it failed.
fn run(command: &mut Command) -> Result<()> {
    let tool = command.get_program().display().to_string();
    let output = command.output().with_context(|| format!("cannot start {tool}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{tool} refuses {}:\n{said}", program().display());
    Ok(())
}

/// The front end of p4c, which knows the architecture's types but no chip.
#[derive(Debug)]
pub struct Checker {
    program: PathBuf,
}

impl Checker {
    fn find() -> Result<Checker> {
        Ok(Checker { program: find("P4TEST", "p4test")? })
    }

    /// Checks the program's types.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check(&self) -> Result<()> {
        run(Command::new(&self.program).args(["--std", "p4-16", TARGET]).arg(program()))
    }

    /// The program, ready to be carried out, with 2^`slot_bits` slots. `target/p4` keeps what came out.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn load(&self, slot_bits: u32) -> Result<Program> {
        let folder = built()?;
        let key = digest(&[sources()])?;
        let json = folder.join(format!("p4test-{}-{slot_bits}-{}.json", version(&self.program)?, &key[..16]));
        if !json.is_file() {
            let unfinished = tempfile::NamedTempFile::new_in(&folder)?;
            let mut command = Command::new(&self.program);
            command.args(["--std", "p4-16", TARGET, "--toJSON"]).arg(unfinished.path());
            let slots = 1u32 << slot_bits;
            command.args([format!("-DPAATP_SLOTS={slots}"), format!("-DPAATP_SLOT_BITS={slot_bits}")]);
            run(command.arg(program()))?;
            unfinished.persist(&json).with_context(|| format!("cannot write {}", json.display()))?;
        }
        Program::read(&json)
    }
}

/// What checks types, for the test `name`, or its skip.
///
/// # Panics
/// Instead of returning nothing, where `PAATP_REQUIRE_P4=1`.
#[must_use]
pub fn require_checker(name: &str) -> Option<Checker> {
    require(name, Checker::find())
}
