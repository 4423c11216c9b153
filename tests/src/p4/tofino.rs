//! The switch program for Tofino (`p4/paatp_tna.p4`): its types checked and its meaning taken from `p4test`, compiled with
//! `p4c-barefoot`, assembled with `bfas`.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use super::pipeline::Program;
use super::{built, digest, find, require, sources, version};

/// Stages of a pipeline of Tofino 1.
pub const STAGES: usize = 12;
/// Stateful units of a stage.
pub const UNITS: usize = 4;
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

/// The back end for the chip.
#[derive(Debug)]
pub struct Backend {
    compiler: PathBuf,
    assembler: PathBuf,
}

impl Backend {
    /// Finds it.
    ///
    /// # Errors
    /// Which part is missing.
    pub fn find() -> Result<Backend> {
        Ok(Backend { compiler: find("P4C_TOFINO", "p4c-barefoot")?, assembler: find("BFAS", "bfas")? })
    }

    /// What the compiler says of its version. (The assembler says nothing.)
    ///
    /// # Errors
    /// Where it does not start.
    pub fn version(&self) -> Result<String> {
        Ok(format!("p4c-barefoot {}", version(&self.compiler)?))
    }

    /// Compiles and assembles the program.
    ///
    /// # Errors
    /// What compiler or assembler said.
    pub fn compile(&self) -> Result<Used> {
        let folder = TempDir::new().context("no temporary folder")?;
        let mut command = Command::new(&self.compiler);
        command.args(["--target", "tofino", "--arch", "tna", "--std", "p4-16", TARGET, "-o"]);
        run(command.arg(folder.path()).arg(program()))?;
        let assembly = folder.path().join("pipe/paatp_tna.bfa");
        let binary = folder.path().join("pipe");
        run(Command::new(&self.assembler).arg("-o").arg(&binary).arg(&assembly))?;
        ensure!(binary.join("tofino.bin").is_file(), "bfas wrote no binary to {}", binary.display());
        Used::read(&assembly)
    }
}

/// What the program takes of the chip.
#[derive(Debug)]
pub struct Used {
    /// By register: its stage.
    pub registers: BTreeMap<String, usize>,
    /// By direction, in the order of stages: match tables.
    pub tables: BTreeMap<&'static str, Vec<usize>>,
}

impl Used {
    /// From the assembly text.
    fn read(assembly: &Path) -> Result<Used> {
        let text = std::fs::read_to_string(assembly)
            .with_context(|| format!("cannot read {}", assembly.display()))?;
        let mut used = Used { registers: BTreeMap::new(), tables: BTreeMap::new() };
        let mut at = None;
        for line in text.lines() {
            if !line.starts_with(' ') {
                at = stage(line);
                continue;
            }
            let Some((direction, number)) = at else { continue };
            let words: Vec<&str> = line.split_whitespace().collect();
            let is_outermost = line.starts_with("  ") && !line.starts_with("   ");
            match words[..] {
                ["stateful", name, ..] if is_outermost => {
                    used.registers.insert(name.trim_end_matches(':').to_owned(), number);
                }
                ["exact_match" | "ternary_match" | "hash_action" | "gateway", ..] if is_outermost => {
                    let stages = used.tables.entry(direction).or_default();
                    stages.resize(stages.len().max(number + 1), 0);
                    stages[number] += 1;
                }
                _ => {}
            }
        }
        Ok(used)
    }

    /// Stages that anything is in.
    #[must_use]
    pub fn stages(&self) -> usize {
        self.tables.values().map(Vec::len).max().unwrap_or(0)
    }
}

/// `stage 3 ingress:`
fn stage(line: &str) -> Option<(&'static str, usize)> {
    let (number, direction) = line.strip_prefix("stage ")?.trim_end_matches(':').split_once(' ')?;
    let direction = ["ingress", "egress"].into_iter().find(|name| *name == direction)?;
    Some((direction, number.parse().ok()?))
}

impl fmt::Display for Used {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut units = [0; STAGES];
        for stage in self.registers.values() {
            if let Some(units) = units.get_mut(*stage) {
                *units += 1;
            }
        }
        writeln!(f, "{} registers in {} stages; by stage {units:?}", self.registers.len(), self.stages())?;
        for (direction, tables) in &self.tables {
            writeln!(f, "{direction}: {} tables; by stage {tables:?}", tables.iter().sum::<usize>())?;
        }
        Ok(())
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

/// What compiles, for the test `name`, or its skip.
///
/// # Panics
/// Instead of returning nothing, where `PAATP_REQUIRE_P4=1`.
#[must_use]
pub fn require_backend(name: &str) -> Option<Backend> {
    require(name, Backend::find())
}
