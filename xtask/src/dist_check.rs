//! `cargo xtask dist check`: the Debian package through its whole life, in a minimal Debian of its own (debootstrap): first
//! where no service manager runs, then booted with systemd (systemd-nspawn).

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::bpf;
use crate::dist;
use crate::process;
use crate::workspace::{Workspace, find_program};

/// The Debian that it is tried in.
const SUITE: &str = "bookworm";
/// What it has beside the minimum.
const INCLUDED: &str = "systemd,systemd-sysv,dbus,iproute2";
/// Longest time that booting it and everything done there may take, in seconds.
const BOOT_SECONDS: &str = "300";
/// What dpkg and debconf keep for themselves.
const BOOKKEEPING: [&str; 5] = ["var/lib/dpkg", "var/log", "var/cache", "tmp", "run"];
/// Link by which the service is enabled.
const ENABLED: &str = "etc/systemd/system/multi-user.target.wants/paatp.service";
const CONFIGURATION: &str = "etc/paatp/paatp.toml";

/// Builds the package and takes it through installation, upgrade, removal and purge.
pub fn run(workspace: &Workspace) -> Result<()> {
    ensure!(bpf::is_root(), "a chroot needs root");
    let package = dist::package(&dist::build(workspace)?)?;
    lint(&package)?;
    {
        // One of its own: booting leaves more than the package.
        let root = Root::new(workspace)?;
        root.install(&package)?;
        root.booted(workspace)?;
    }
    let root = Root::new(workspace)?;
    let before = root.files()?;

    root.install(&package)?;
    root.installed()?;
    root.started()?;
    // An administrator's changes, and a state.
    let changed = root.read(CONFIGURATION)?.replace("# iface = \"eth0\"", "iface = \"lo\"");
    root.write(CONFIGURATION, &changed)?;
    root.write("var/lib/paatp/token", "0123456789abcdef\n")?;

    root.install(&newer(workspace, &package)?)?;
    ensure!(root.read(CONFIGURATION)? == changed, "the upgrade changed the configuration");
    ensure!(root.is_link(ENABLED), "the upgrade disabled the service");

    root.run("dpkg", &["--remove", "paatp"])?;
    ensure!(!root.path("usr/bin/paatp").exists(), "the program stayed after removal");
    ensure!(root.read(CONFIGURATION)? == changed, "removal took the configuration");
    ensure!(root.path("var/lib/paatp/token").exists(), "removal took the state");

    root.run("dpkg", &["--purge", "paatp"])?;
    let after = root.files()?;
    let left: Vec<_> = after.difference(&before).collect();
    ensure!(left.is_empty(), "the purge left {left:?}");
    let gone: Vec<_> = before.difference(&after).collect();
    ensure!(gone.is_empty(), "the purge took what was there before: {gone:?}");
    println!("dist check: installed, started, booted, upgraded, removed and purged: {}", package.display());
    Ok(())
}

/// Debian's own checker, where it is installed. Errors fail.
fn lint(package: &Path) -> Result<()> {
    if find_program("lintian").is_none() {
        println!("dist check: not linted: lintian is missing");
        return Ok(());
    }
    let mut command = Command::new("lintian");
    command.args(["--allow-root", "--fail-on", "error"]).arg(package);
    process::run(&mut command, "Its tags are explained by `lintian-explain-tags`.")
}

/// The same package with a higher version.
fn newer(workspace: &Workspace, package: &Path) -> Result<PathBuf> {
    let folder = workspace.target.join("dist-check-newer");
    dist::empty(&folder)?;
    let tree = folder.join("tree");
    let advice = "dpkg-deb could not repack the package.";
    process::run(Command::new("dpkg-deb").arg("--raw-extract").arg(package).arg(&tree), advice)?;
    let control = tree.join("DEBIAN/control");
    let text = fs::read_to_string(&control).context("the package has no control file")?;
    let lines = text.lines().map(|line| match line.strip_prefix("Version: ") {
        Some(version) => format!("Version: {version}+newer\n"),
        None => format!("{line}\n"),
    });
    fs::write(&control, lines.collect::<String>()).context("cannot write the control file")?;
    let newer = folder.join("newer.deb");
    process::run(
        Command::new("dpkg-deb").args(["--root-owner-group", "--build"]).args([&tree, &newer]),
        advice,
    )?;
    Ok(newer)
}

/// A minimal Debian in a folder; removed when dropped.
struct Root(PathBuf);

impl Root {
    /// Unpacks one, from the archive of an earlier time if there is one.
    fn new(workspace: &Workspace) -> Result<Root> {
        let base = workspace.target.join(format!("tools/debootstrap-{SUITE}"));
        if !base.is_dir() {
            if find_program("debootstrap").is_none() {
                bail!("debootstrap is missing; `apt-get install debootstrap` gets it");
            }
            // Under its name once it is complete.
            let fresh = base.with_extension("new");
            dist::empty(&fresh)?;
            let mut command = Command::new("debootstrap");
            command.args(["--variant=minbase", "--include", INCLUDED, SUITE]).arg(&fresh);
            process::run(&mut command, "It downloads from Debian's mirror; check the network and repeat.")?;
            fs::rename(&fresh, &base).with_context(|| format!("cannot rename {}", fresh.display()))?;
        }
        let folder = workspace.target.join("dist-check-root");
        dist::empty(&folder)?;
        let copy = format!("{}/.", base.display());
        process::run(Command::new("cp").args(["-a", &copy]).arg(&folder), "Is there room?")?;
        Ok(Root(folder))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn is_link(&self, name: &str) -> bool {
        self.path(name).is_symlink()
    }

    fn read(&self, name: &str) -> Result<String> {
        fs::read_to_string(self.path(name)).with_context(|| format!("cannot read {name} of the chroot"))
    }

    fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.path(name);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).with_context(|| format!("cannot make the folder of {name}"))?;
        }
        fs::write(path, text).with_context(|| format!("cannot write {name} of the chroot"))
    }

    /// A command inside, without the services of this machine.
    fn command(&self, program: &str, args: &[&str]) -> Command {
        let mut command = Command::new("chroot");
        command.arg(&self.0).arg(program).args(args);
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("LC_ALL", "C.UTF-8");
        command.env("DEBIAN_FRONTEND", "noninteractive");
        command
    }

    fn run(&self, program: &str, args: &[&str]) -> Result<()> {
        process::run(&mut self.command(program, args), "This was in the chroot; its messages are above.")
    }

    fn output(&self, program: &str, args: &[&str]) -> Result<String> {
        process::must_output(&mut self.command(program, args), "This was in the chroot.")
    }

    fn install(&self, package: &Path) -> Result<()> {
        fs::copy(package, self.path("tmp/paatp.deb")).context("cannot copy the package into the chroot")?;
        self.run("dpkg", &["--install", "/tmp/paatp.deb"])
    }

    /// Everything is at its place; the service is enabled, and would be skipped.
    fn installed(&self) -> Result<()> {
        for (name, mode) in [
            ("usr/bin/paatp", 0o755),
            ("lib/systemd/system/paatp.service", 0o644),
            (CONFIGURATION, 0o644),
            ("usr/share/man/man1/paatp-run.1.gz", 0o644),
            ("usr/share/bash-completion/completions/paatp", 0o644),
            ("usr/share/zsh/vendor-completions/_paatp", 0o644),
            ("usr/share/fish/vendor_completions.d/paatp.fish", 0o644),
            ("usr/share/doc/paatp/operations.md", 0o644),
            ("usr/share/doc/paatp/copyright", 0o644),
        ] {
            // minbase has `usr/lib` behind `lib`.
            let found = fs::metadata(self.path(name)).with_context(|| format!("the package lacks {name}"))?;
            let found = found.permissions().mode() & 0o7777;
            ensure!(found == mode, "{name} has mode {found:o}, not {mode:o}");
        }
        ensure!(self.is_link(ENABLED), "the service is not enabled");
        let unit = self.read("lib/systemd/system/paatp.service")?;
        let condition = unit.lines().find_map(|line| line.strip_prefix("ExecCondition="));
        let condition = condition.context("the unit has no condition")?;
        let skipped = self.command("/bin/sh", &["-c", condition]).status().context("no chroot")?;
        ensure!(skipped.code() == Some(1), "the service would start without an interface: {skipped}");
        let with = format!("export PAATP_IFACE=lo; {condition}");
        let started = self.command("/bin/sh", &["-c", &with]).status().context("no chroot")?;
        ensure!(
            started.success(),
            "the service would be skipped although the environment names an interface"
        );
        self.run("paatp", &["config", "check", "/etc/paatp/paatp.toml"])
    }

    /// The unit's command works with the package's configuration: here with a loopback interface of its own.
    fn started(&self) -> Result<()> {
        let version = self.output("paatp", &["--version"])?;
        ensure!(version.starts_with("paatp "), "{version}");
        if let Some(reason) = bpf::unavailable() {
            println!("dist check: not started: {reason}");
            return Ok(());
        }
        let script = "ip link set lo up; mount -t proc proc \"$1/proc\"; mount --rbind /sys \"$1/sys\"; exec timeout --preserve-status --signal TERM 10 \
                      chroot \"$1\" paatp run --config /etc/paatp/paatp.toml --iface lo --xdp-mode generic";
        let mut command = Command::new("unshare");
        command.args(["--net", "--mount", "sh", "-ec", script, "sh"]).arg(&self.0);
        let output = process::must_output(&mut command, "The package's program did not run in the chroot.")?;
        ensure!(output.contains("ready: iface=lo mode=generic"), "it did not get ready: {output}");
        Ok(())
    }

    /// The service under a systemd of its own, with its hardening: `packaging/check/boot` says what is tried.
    fn booted(&self, workspace: &Workspace) -> Result<()> {
        if find_program("systemd-nspawn").is_none() {
            println!(
                "dist check: not booted: systemd-nspawn is missing; it is in Debian's systemd-container"
            );
            return Ok(());
        }
        if let Some(reason) = bpf::unavailable() {
            println!("dist check: not booted: {reason}");
            return Ok(());
        }
        let script = fs::read_to_string(workspace.root.join("packaging/check/boot"))
            .context("cannot read packaging/check/boot")?;
        self.write("root/boot-check", &script)?;
        self.write(
            "etc/systemd/system/boot-check.service",
            "[Unit]\nAfter=paatp.service\n\n[Service]\nType=oneshot\nTimeoutStartSec=240\nExecStart=/bin/sh /root/boot-check\n",
        )?;
        let wanted = self.path("etc/systemd/system/multi-user.target.wants/boot-check.service");
        symlink("/etc/systemd/system/boot-check.service", &wanted).context("cannot enable the check")?;
        // A BPF file system of its own: no pin outlives this.
        let bpffs = Mount::bpf(workspace.target.join("dist-check-bpffs"))?;
        let mut command = Command::new("timeout");
        command.args([
            "--signal",
            "KILL",
            BOOT_SECONDS,
            "systemd-nspawn",
            "--quiet",
            "--boot",
            "--register=no",
        ]);
        command.args([
            "--keep-unit",
            "--private-network",
            "--capability=CAP_BPF",
            "--system-call-filter=bpf",
        ]);
        command.args(["--console=pipe", "--directory"]).arg(&self.0);
        command.arg(format!("--bind={}:/sys/fs/bpf", bpffs.0.display())).stdin(Stdio::null());
        let ended = process::run(&mut command, "It was to shut down by itself.");
        let log = self.read("root/boot-check.log").unwrap_or_default();
        if log.lines().last() != Some("right") && !log.contains("\nright\n") {
            eprintln!("{log}");
            ended?;
            bail!("the service does not do under systemd what packaging/check/boot asks of it: see above");
        }
        Ok(())
    }

    /// All files but those that package tools keep for themselves.
    fn files(&self) -> Result<BTreeSet<PathBuf>> {
        let mut found = BTreeSet::new();
        let mut folders = vec![self.0.clone()];
        while let Some(folder) = folders.pop() {
            let entries =
                fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))?;
            for entry in entries {
                let path = entry?.path();
                let name = path.strip_prefix(&self.0)?.to_owned();
                if BOOKKEEPING.iter().any(|kept| name == Path::new(kept)) {
                    continue;
                }
                if path.is_dir() && !path.is_symlink() {
                    folders.push(path);
                }
                found.insert(name);
            }
        }
        Ok(found)
    }
}

/// A mounted file system; unmounted when dropped.
struct Mount(PathBuf);

impl Mount {
    fn bpf(folder: PathBuf) -> Result<Mount> {
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let mut command = Command::new("mount");
        process::run(command.args(["-t", "bpf", "bpf"]).arg(&folder), "BPF is needed for this check.")?;
        Ok(Mount(folder))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        // A folder below target; it is emptied before the next use as well.
        let _ = fs::remove_dir_all(&self.0);
    }
}
