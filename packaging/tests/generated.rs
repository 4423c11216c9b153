//! What is checked in is what the code says, and what is made from it can be used.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use paatp_packaging::{assets, codegen, regions, with_regions};
use paatp_tests::skip;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

#[test]
fn checked_in_files_are_what_the_code_says() {
    let check = std::env::var_os("PAATP_BLESS").is_none();
    codegen(root(), check).unwrap();
}

/// The comparison above sees a capability too many and one too few.
#[test]
fn a_difference_is_seen() {
    for (file, regions) in regions() {
        let text = fs::read_to_string(root().join(file)).unwrap();
        for (name, content) in &regions {
            let begin = text.find(&format!(">>> {name}")).unwrap();
            let line = content.lines().last().unwrap();
            let at = begin + text[begin..].find(line).unwrap();
            let mut changed = text.clone();
            changed.replace_range(at..at + line.len(), "something else");
            assert_eq!(with_regions(&changed, &regions).unwrap(), text, "{file}: {name}");
        }
        assert!(with_regions("nothing", &regions).is_err());
    }
}

#[test]
fn man_pages_and_completions_are_made() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    assets(folder).unwrap();
    let file = |name: &str| fs::read_to_string(folder.join(name)).unwrap();
    for (page, parts) in [
        ("man/paatp.1", ["paatp-run", "Exit status"]),
        ("man/paatp-run.1", ["drain", "PAATP_IFACE"]),
        ("man/paatp-job-create.1", ["key", "world"]),
        ("man/paatp-config-dump.1", ["where each comes from", "PAATP_PORT"]),
    ] {
        let text = file(page);
        assert!(text.contains(".TH"), "{page}");
        let text = text.replace("\\-", "-");
        assert!(parts.iter().all(|part| text.contains(part)), "{page} lacks one of {parts:?}");
    }
    for (name, shell, arguments) in [
        ("paatp.bash", "bash", &["-n"][..]),
        ("_paatp", "zsh", &["-n"]),
        ("paatp.fish", "fish", &["--no-execute"]),
    ] {
        let path = folder.join("completions").join(name);
        assert!(fs::read_to_string(&path).unwrap().contains("drain-timeout"), "{name}");
        match Command::new(shell).args(arguments).arg(&path).stdin(Stdio::null()).output() {
            Ok(output) => assert!(output.status.success(), "{name}: {output:?}"),
            Err(_) if shell == "bash" => skip("generated::completions", "bash is missing"),
            // Not everybody has these, and Debian's are not worth installing for a syntax check.
            Err(_) => {}
        }
    }
    let man = Command::new("man").args(["--warnings", "-l"]).arg(folder.join("man/paatp-run.1")).output();
    if let Ok(output) = man {
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    }
}
