//! `cargo xtask verify`: loads every eBPF program and holds it against a budget.
//!
//! The kernel walks at most a million instructions and gives 512 bytes of stack to a program and what it calls. A change
//! that doubles either is seen here before a newer kernel refuses it.

use anyhow::{Context, Result, bail};
use aya::programs::{Program, SchedClassifier, Xdp};
use aya::{Ebpf, EbpfLoader, VerifierLogLevel};
use paatp_tests::objects::{Budget, budget, object, stack_bytes};

fn main() -> Result<()> {
    let mut over = Vec::new();
    println!(
        "{:<10} {:<20} {:>10} {:>10} {:>7} {:>7}",
        "object", "program", "walked", "budget", "stack", "budget"
    );
    for name in ["paatp.bpf.o", "worker.bpf.o", "lab.bpf.o"] {
        let bytes = object(name)?;
        let mut ebpf = EbpfLoader::new().verifier_log_level(VerifierLogLevel::STATS).load(&bytes)?;
        let mut programs: Vec<String> = ebpf.programs().map(|(program, _)| program.to_owned()).collect();
        programs.sort();
        for program in programs {
            let walked = walked(&mut ebpf, &program).with_context(|| format!("{name}: {program}"))?;
            let stack = stack_bytes(&bytes, &program)?;
            let Budget { instructions, stack: stack_budget } = budget(&program);
            println!(
                "{:<10} {program:<20} {walked:>10} {instructions:>10} {stack:>7} {stack_budget:>7}",
                name.trim_end_matches(".bpf.o")
            );
            if walked > instructions || stack > stack_budget {
                over.push(program);
            }
        }
    }
    if !over.is_empty() {
        bail!(
            "over budget: {}. Either the change can do with less (docs/ebpf.md says what costs), or raise the budget in tests/src/objects.rs and say why.",
            over.join(", ")
        );
    }
    println!("all programs load within their budgets");
    Ok(())
}

/// Loads a program; returns how many instructions the verifier walked.
fn walked(ebpf: &mut Ebpf, name: &str) -> Result<u32> {
    let program = ebpf.program_mut(name).context("it vanished")?;
    let info = match program {
        Program::Xdp(_) => {
            let program: &mut Xdp = program.try_into()?;
            program.load()?;
            program.info()?
        }
        Program::SchedClassifier(_) => {
            let program: &mut SchedClassifier = program.try_into()?;
            program.load()?;
            program.info()?
        }
        other => bail!("a program of an unexpected type: {other:?}"),
    };
    info.verified_instruction_count()
        .context("this kernel does not tell what its verifier walked (5.16 does)")
}
