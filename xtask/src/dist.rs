//! `cargo xtask codegen` and `cargo xtask dist`: what is made from the program, and everything that is given to others.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::install;
use crate::objects;
use crate::process;
use crate::workspace::{Profile, Workspace, find_program};

/// The cargo-deb that is built where none is found.
pub const CARGO_DEB_VERSION: &str = "3.8.0";
/// Where cargo-deb takes what is made from the program: below the folder of the release build, which it knows.
const ASSETS: &str = "paatp-assets";
/// Checked-in files that lie beside the program in `dist`.
const COPIED: [&str; 6] = [
    "packaging/systemd/paatp.service",
    "packaging/debian/paatp.toml",
    "packaging/container/Containerfile",
    "LICENSE-MIT",
    "LICENSE-APACHE",
    "CHANGELOG.md",
];

/// Writes what the code decides into checked-in files, or says which are not as they should be.
pub fn codegen(workspace: &Workspace, check: bool) -> Result<()> {
    objects::ebpf(workspace)?;
    objects::host(workspace, Profile::Debug, &["packaging"])?;
    let mut command = Command::new(workspace.binary(Profile::Debug, "packaging"));
    command.arg("codegen").arg(&workspace.root).args(check.then_some("--check"));
    process::run(&mut command, "`cargo xtask codegen` writes what differs.")
}

/// Writes the test vectors, or says which are not as they should be.
pub fn vectors(workspace: &Workspace, check: bool) -> Result<()> {
    objects::host(workspace, Profile::Debug, &["vectors"])?;
    let mut command = Command::new(workspace.binary(Profile::Debug, "vectors"));
    command.args(check.then_some("--check"));
    process::run(&mut command, "`cargo xtask vectors` writes what differs.")
}

/// Builds everything; the folder that it is in.
pub fn build(workspace: &Workspace) -> Result<PathBuf> {
    objects::ebpf(workspace)?;
    objects::host(workspace, Profile::Release, &["paatp", "packaging"])?;
    let dist = workspace.target.join("dist");
    let assets = workspace.target.join(Profile::Release.folder()).join(ASSETS);
    for folder in [&dist, &assets] {
        empty(folder)?;
    }
    for folder in [&dist, &assets] {
        let mut command = Command::new(workspace.binary(Profile::Release, "packaging"));
        process::run(command.arg("assets").arg(folder), "It could not write below the target directory.")?;
    }
    copy(&workspace.binary(Profile::Release, "paatp"), &dist)?;
    if find_program("strip").is_some() {
        let mut strip = Command::new("strip");
        process::run(strip.arg("--strip-unneeded").arg(dist.join("paatp")), "It is of GNU binutils.")?;
    }
    for file in COPIED {
        copy(&workspace.root.join(file), &dist)?;
    }
    debian(workspace, &dist)?;
    println!("dist: {}", dist.display());
    Ok(dist)
}

/// Makes the Debian package.
fn debian(workspace: &Workspace, dist: &Path) -> Result<()> {
    if find_program("dpkg-deb").is_none() {
        println!("no Debian package: dpkg-deb is missing, this is no Debian");
        return Ok(());
    }
    let program = match find_program("cargo-deb") {
        Some(program) => program,
        None => {
            let root = workspace.target.join("tools/cargo-deb");
            let program = root.join("bin/cargo-deb");
            if !program.is_file() {
                install::cargo_deb(workspace, &root, CARGO_DEB_VERSION)?;
            }
            program
        }
    };
    // As Debian wants them.
    let pages = workspace.target.join(Profile::Release.folder()).join(ASSETS).join("man");
    let pages = files(&pages)?;
    process::run(Command::new("gzip").args(["-9", "-n"]).args(pages), "gzip is in every Debian.")?;
    let mut command = Command::new(program);
    workspace.dress(&mut command);
    command.args(["--package", "paatp-user", "--no-build", "--strip", "--no-dbgsym", "--output"]).arg(dist);
    process::run(&mut command, "The metadata are in paatp-user/Cargo.toml.")
}

/// The one Debian package in a folder.
pub fn package(dist: &Path) -> Result<PathBuf> {
    let mut packages = files(dist)?;
    packages.retain(|path| path.extension().is_some_and(|extension| extension == "deb"));
    match packages.as_slice() {
        [package] => Ok(package.clone()),
        all => bail!("{} Debian packages in {}, one was to be there", all.len(), dist.display()),
    }
}

fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    Ok(entries.flatten().map(|entry| entry.path()).collect())
}

/// A folder with nothing in it.
pub fn empty(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("cannot empty {}", folder.display()))?;
    }
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))
}

fn copy(from: &Path, folder: &Path) -> Result<()> {
    let name = from.file_name().context("a file without a name")?;
    fs::copy(from, folder.join(name))
        .with_context(|| format!("cannot copy {} to {}", from.display(), folder.display()))?;
    Ok(())
}
