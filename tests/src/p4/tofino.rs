//! The switch program for Tofino (`p4/paatp_tna.p4`): its types are checked and its meaning is taken from `p4test`; the back
//! end for the chip compiles it (`p4c-barefoot`) and assembles it (`bfas`), and says what it takes of the chip.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use super::pipeline::Program;
use super::{built, digest, find, require, sources, version};

/// Stages of a pipeline of Tofino 1.
pub const STAGES: usize = 12;
/// Units of a stage that may touch a register.
pub const UNITS: usize = 4;
/// Tables that a stage has numbers for.
pub const TABLES: usize = 16;
/// Packet header registers of 8, 16 and 32 bits that tables can compute with.
pub const CONTAINERS: [(char, usize); 3] = [('B', 64), ('H', 96), ('W', 64)];
/// What the assembler says of a parser's state that always goes to the first of its next states.
const NO_PATTERNS: &str = "Can't match parser state";
/// What chooses the chip in the headers of the architecture.
const TARGET: &str = "-D__TARGET_TOFINO__=1";

fn program() -> PathBuf {
    sources().join("paatp_tna.p4")
}

/// Runs a tool; returns what it said.
fn run(command: &mut Command) -> Result<String> {
    let tool = command.get_program().display().to_string();
    let output = command.output().with_context(|| format!("cannot start {tool}"))?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{tool} refuses {}:\n{said}", program().display());
    Ok(said)
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
        run(Command::new(&self.program).args(["--std", "p4-16", TARGET]).arg(program())).map(drop)
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

/// Compiler and assembler for the chip.
#[derive(Debug)]
pub struct Backend {
    compiler: PathBuf,
    assembler: PathBuf,
}

impl Backend {
    /// Finds them.
    ///
    /// # Errors
    /// Which is missing.
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

    /// Compiles the program, unless these sources were compiled before (`target/p4` keeps what came out: it takes minutes),
    /// and assembles it.
    ///
    /// # Errors
    /// What compiler or assembler said.
    pub fn build(&self) -> Result<Used> {
        let kept = built()?;
        let key = digest(&[sources()])?;
        let assembly = kept.join(format!("p4c-barefoot-{}-{}.bfa", version(&self.compiler)?, &key[..16]));
        let folder = TempDir::new_in(&kept).context("no temporary folder")?;
        if !assembly.is_file() {
            let mut command = Command::new(&self.compiler);
            command.args(["--target", "tofino", "--arch", "tna", "--std", "p4-16", TARGET, "-o"]);
            run(command.arg(folder.path()).arg(program()))?;
            let made = folder.path().join("pipe/paatp_tna.bfa");
            fs::rename(&made, &assembly).with_context(|| format!("there is no {}", made.display()))?;
        }
        // The assembler writes reports to a folder that must be there.
        let out = folder.path().join("out");
        fs::create_dir_all(out.join("logs"))?;
        let said = run(Command::new(&self.assembler).arg("-o").arg(&out).arg(&assembly))?;
        ensure!(
            !said.contains(NO_PATTERNS),
            "{} leaves the patterns of parsers out (docs/switch.md, \"On Tofino\", says what to mend):\n{said}",
            self.compiler.display()
        );
        let binary = out.join("tofino.bin");
        let bytes =
            fs::metadata(&binary).with_context(|| format!("bfas wrote no {}", binary.display()))?.len();
        ensure!(bytes > 0, "{} is empty", binary.display());
        Used::read(&assembly)
    }
}

/// What the program takes of the chip.
#[derive(Debug, Default)]
pub struct Used {
    /// By register: its stage.
    pub registers: BTreeMap<String, usize>,
    /// By direction, in the order of stages: tables, those that the compiler made included.
    pub tables: BTreeMap<&'static str, Vec<usize>>,
    /// By letter of their width: packet header registers.
    pub containers: BTreeMap<String, usize>,
    /// Units that make addresses or numbers of a hash: each in each stage.
    pub hash_units: usize,
}

impl Used {
    /// From the assembly text.
    fn read(assembly: &Path) -> Result<Used> {
        let text =
            fs::read_to_string(assembly).with_context(|| format!("cannot read {}", assembly.display()))?;
        let mut used = Used::default();
        let mut section = "";
        let mut in_hash_units = false;
        let mut containers = BTreeSet::new();
        let mut hash_units = BTreeSet::new();
        for line in text.lines().filter(|line| !line.is_empty()) {
            if !line.starts_with(' ') {
                section = line;
                continue;
            }
            if section.starts_with("phv ") {
                let place = line.split_once(": ").map_or("", |(_, place)| place);
                containers.extend(
                    place.split(|c: char| !c.is_ascii_alphanumeric()).filter(|name| is_container(name)),
                );
                continue;
            }
            let Some((direction, number)) = stage(section) else { continue };
            let depth = line.len() - line.trim_start().len();
            let words: Vec<&str> = line.split_whitespace().collect();
            match words[..] {
                ["stateful", name, ..] if depth == 2 => {
                    // `table$salu.register:`
                    let name = name.trim_end_matches(':');
                    let name = name.split_once("$salu.").map_or(name, |(_, register)| register);
                    used.registers.insert(name.to_owned(), number);
                }
                [kind, _, _, ..] if depth == 2 && is_table(kind) => {
                    let stages = used.tables.entry(direction).or_default();
                    stages.resize(stages.len().max(number + 1), 0);
                    stages[number] += 1;
                }
                [unit, "{", "hash:", ..] if in_hash_units => {
                    hash_units.insert((number, direction, unit));
                }
                _ => {}
            }
            in_hash_units = words == ["hash_dist:"] || in_hash_units && depth > 4;
        }
        for name in containers {
            *used
                .containers
                .entry(name.trim_end_matches(|c: char| c.is_ascii_digit()).to_owned())
                .or_default() += 1;
        }
        used.hash_units = hash_units.len();
        ensure!(!used.tables.is_empty(), "{} has no tables", assembly.display());
        Ok(used)
    }

    /// Stages that anything is in.
    #[must_use]
    pub fn stages(&self) -> usize {
        self.tables.values().map(Vec::len).max().unwrap_or(0)
    }

    /// Units that touch a register, in the order of stages.
    #[must_use]
    pub fn units(&self) -> Vec<usize> {
        let mut units = vec![0; self.stages()];
        for stage in self.registers.values() {
            if let Some(units) = units.get_mut(*stage) {
                *units += 1;
            }
        }
        units
    }
}

/// `stage 3 ingress:`
fn stage(section: &str) -> Option<(&'static str, usize)> {
    let (number, direction) = section.strip_prefix("stage ")?.trim_end_matches(':').split_once(' ')?;
    let direction = ["ingress", "egress"].into_iter().find(|name| *name == direction)?;
    Some((direction, number.parse().ok()?))
}

/// Of a table with a number of its own.
fn is_table(kind: &str) -> bool {
    matches!(kind, "exact_match" | "ternary_match" | "hash_action" | "gateway")
}

/// `W12`; with a T those that only carry headers through.
fn is_container(name: &str) -> bool {
    let name = name.strip_prefix('T').unwrap_or(name);
    let number = name.strip_prefix(CONTAINERS.map(|(letter, _)| letter)).unwrap_or_default();
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

impl fmt::Display for Used {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = self.units();
        writeln!(f, "{} stages", self.stages())?;
        writeln!(f, "{} registers; by stage {units:?}", self.registers.len())?;
        for (direction, tables) in &self.tables {
            writeln!(f, "{direction}: {} tables; by stage {tables:?}", tables.iter().sum::<usize>())?;
        }
        writeln!(f, "packet header registers {:?}", self.containers)?;
        write!(f, "{} hash units", self.hash_units)
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

/// What compiles and assembles, for the test `name`, or its skip.
///
/// # Panics
/// Instead of returning nothing, where `PAATP_REQUIRE_P4=1`.
#[must_use]
pub fn require_backend(name: &str) -> Option<Backend> {
    require(name, Backend::find())
}
