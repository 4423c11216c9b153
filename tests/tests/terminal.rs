//! `paatp status` and `paatp top` as processes, on pipes and on a pseudo-terminal, against made-up answers: no privileges
//! needed.

#[path = "page/scene.rs"]
mod scene;

use std::fs::File;
use std::io::{Read, Write};
use std::num::NonZeroU16;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::pty::{Winsize, openpty};
use nix::sys::signal::{Signal, kill};
use nix::sys::termios::{LocalFlags, tcgetattr};
use nix::unistd::Pid;
use paatp_tests::process::{Finished, Process, paatp, wait_until};
use scene::{Scene, Server};

/// Longest wait for anything: machines that run tests are busy.
const DEADLINE: Duration = Duration::from_secs(60);

fn command(server: &Server, args: &[&str]) -> Result<Command> {
    let mut command = Command::new(paatp()?);
    command.args(args).args(["--control", &server.address.to_string()]);
    Ok(command)
}

fn run(server: &Server, args: &[&str]) -> Result<Finished> {
    Process::spawn("paatp", command(server, args)?)?.wait(DEADLINE)
}

#[test]
fn the_status_says_by_its_exit_whether_all_is_well() -> Result<()> {
    let mut scene = Scene::new(3, 4);
    let mut server = Server::start(scene.clone())?;
    let well = run(&server, &["status"])?;
    assert_eq!(well.status.code(), Some(0), "{}", well.output);
    assert!(well.output.contains("all is well") && well.output.contains("train-2"), "{}", well.output);

    scene.stall(1, 3);
    *server.scene() = scene;
    let held = run(&server, &["status"])?;
    assert_eq!(held.status.code(), Some(6), "{}", held.output);
    let sentence = "! job `train-1` waits for contributions of rank 3 for 3.2 s, 64 chunks behind";
    assert!(held.output.contains(sentence), "{}", held.output);
    // Other jobs are well.
    assert_eq!(run(&server, &["status", "train-0"])?.status.code(), Some(0));
    assert_eq!(run(&server, &["status", "train-1"])?.status.code(), Some(6));
    let unknown = run(&server, &["status", "eval"])?;
    assert_eq!(unknown.status.code(), Some(1));
    assert!(
        unknown.output.contains("has no job `eval`; it has train-0, train-1, train-2"),
        "{}",
        unknown.output
    );

    let json = run(&server, &["status", "--json"])?;
    let value: serde_json::Value = serde_json::from_str(&json.output)?;
    assert_eq!((json.status.code(), &value["schema_version"]), (Some(6), &1.into()));
    assert_eq!(value, server.scene().status(), "all that the aggregator says, and nothing else");

    server.scene().refuses = Some(503);
    let busy = run(&server, &["status"])?;
    assert_eq!(busy.status.code(), Some(1));
    assert!(busy.output.contains("too many who look"), "{}", busy.output);
    server.stop();
    let silent = run(&server, &["status"])?;
    assert_eq!(silent.status.code(), Some(1));
    assert!(silent.output.contains("is `paatp run` running there"), "{}", silent.output);
    assert_eq!(run(&server, &["status", "--json", "--watch"])?.status.code(), Some(2));
    assert!(
        server.scene().asked.iter().all(|path| path == "/v1/status"),
        "no secret is sent, nothing else asked"
    );
    Ok(())
}

#[test]
fn watching_goes_on_until_control_c() -> Result<()> {
    let mut server = Server::start(Scene::new(1, 2))?;
    let mut watch = Process::spawn("paatp status --watch", command(&server, &["status", "--watch"])?)?;
    watch.wait_for_line("all is well", DEADLINE)?;
    server.stop();
    watch.wait_for_line("No answer: no aggregator answers at", DEADLINE)?;
    watch.wait_for_line("What follows is", DEADLINE)?;
    server.scene().node["build"]["version"] = "0.2.0".into();
    server.resume()?;
    watch.wait_for_line("paatp 0.2.0 at", DEADLINE)?;
    ensure!(!watch.output().contains('\u{1b}'), "signs for a terminal in a pipe");
    watch.signal(Signal::SIGINT)?;
    let finished = watch.wait(DEADLINE)?;
    assert_eq!((finished.status.code(), finished.signal()), (Some(0), None), "{}", finished.output);
    Ok(())
}

/// A program on a pseudo-terminal of its own, and what its screen shows.
fn sized(cells: u16) -> Result<NonZeroU16> {
    NonZeroU16::new(cells).context("a terminal has rows and columns")
}

struct Terminal {
    child: Child,
    input: File,
    screen: Arc<Mutex<vt100::Parser>>,
    /// Keeps the terminal alive after the program has ended.
    far: OwnedFd,
}

impl Terminal {
    fn start(program: &Command, rows: u16, columns: u16) -> Result<Terminal> {
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let pty = openpty(&size, None)?;
        let far = || -> Result<Stdio> { Ok(pty.slave.try_clone()?.into()) };
        // Makes it the controlling terminal, so that the kernel tells of its size.
        let child = Command::new("setsid")
            .arg("--ctty")
            .arg(program.get_program())
            .args(program.get_args())
            .stdin(far()?)
            .stdout(far()?)
            .stderr(far()?)
            .spawn()
            .context("cannot start setsid (util-linux)")?;
        let screen = Arc::new(Mutex::new(vt100::Parser::new(sized(rows)?, sized(columns)?, 0)));
        let (shown, mut output) = (screen.clone(), File::from(pty.master.try_clone()?));
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(read @ 1..) = output.read(&mut bytes) {
                shown.lock().unwrap_or_else(PoisonError::into_inner).process(&bytes[..read]);
            }
        });
        Ok(Terminal { child, input: pty.master.into(), screen, far: pty.slave })
    }

    fn look<T>(&self, look: impl FnOnce(&vt100::Screen) -> T) -> T {
        look(self.screen.lock().unwrap_or_else(PoisonError::into_inner).screen())
    }

    fn contents(&self) -> String {
        self.look(vt100::Screen::contents)
    }

    fn wait_for(&self, text: &str) -> Result<()> {
        let shown = wait_until("the screen showed it", DEADLINE, || Ok(self.contents().contains(text)));
        shown.with_context(|| format!("no \"{text}\" on the screen:\n{}", self.contents()))
    }

    fn type_in(&mut self, keys: &str) -> Result<()> {
        self.input.write_all(keys.as_bytes()).context("cannot type")
    }

    fn resize(&self, rows: u16, columns: u16) -> Result<()> {
        let mut screen = self.screen.lock().unwrap_or_else(PoisonError::into_inner);
        screen.screen_mut().set_size(sized(rows)?, sized(columns)?);
        drop(screen);
        let (rows, columns) = (rows.to_string(), columns.to_string());
        let mut stty = Command::new("stty");
        stty.args(["rows", &rows, "cols", &columns]).stdin(Stdio::from(self.far.try_clone()?));
        ensure!(stty.status()?.success(), "stty fails");
        Ok(())
    }

    /// Waits for its end; then the terminal must be as it was before.
    fn end(mut self) -> Result<ExitStatus> {
        let mut status = None;
        wait_until("it ended", DEADLINE, || {
            status = self.child.try_wait()?;
            Ok(status.is_some())
        })?;
        wait_until("the terminal was restored", DEADLINE, || {
            Ok(self.look(|screen| !screen.alternate_screen() && !screen.hide_cursor()))
        })?;
        let flags = tcgetattr(self.far.as_fd())?.local_flags;
        ensure!(flags.contains(LocalFlags::ICANON | LocalFlags::ECHO | LocalFlags::ISIG), "{flags:?}");
        status.context("no status")
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn top_follows_keys_sizes_and_the_aggregator() -> Result<()> {
    let mut scene = Scene::new(5, 4);
    scene.stall(3, 2);
    let mut server = Server::start(scene)?;
    let mut top = Terminal::start(&command(&server, &["top"])?, 30, 110)?;
    top.wait_for("▲ job `train-3` waits for contributions of rank 2 for 3.2 s")?;
    top.wait_for("train-3, generation 77")?;
    // The past of the job that is chosen is there.
    top.wait_for("▇")?;
    let raw = tcgetattr(top.far.as_fd())?.local_flags;
    assert!(!raw.contains(LocalFlags::ECHO) && top.look(vt100::Screen::alternate_screen));
    top.type_in("j")?;
    top.wait_for("train-4, generation 77")?;
    // Up, as terminals send it.
    top.type_in("\x1b[A\x1b[A")?;
    top.wait_for("train-2, generation 77")?;
    top.type_in("\r")?;
    top.wait_for("esc back")?;
    assert!(!top.contents().contains("Jobs ("), "{}", top.contents());
    top.resize(24, 80)?;
    wait_until("it was drawn for the new size", DEADLINE, || {
        Ok(top.contents().lines().count() <= 24 && top.contents().contains("esc back"))
    })?;
    top.type_in("?")?;
    top.wait_for("this; any key closes it")?;
    top.type_in("x\x7f")?;
    top.wait_for("Jobs (5)")?;

    server.stop();
    top.wait_for("▲ no answer")?;
    top.wait_for("what is shown is")?;
    assert!(top.contents().contains("train-2"), "what was known stays:\n{}", top.contents());
    server.resume()?;
    wait_until("it goes on", DEADLINE, || Ok(!top.contents().contains("no answer")))?;
    top.type_in("q")?;
    let status = top.end()?;
    assert_eq!(status.code(), Some(0));
    Ok(())
}

#[test]
fn top_leaves_the_terminal_as_it_was_however_it_ends() -> Result<()> {
    let server = Server::start(Scene::new(1, 2))?;
    for (signal, code) in [(Signal::SIGTERM, 143), (Signal::SIGINT, 130), (Signal::SIGHUP, 129)] {
        let top = Terminal::start(&command(&server, &["top"])?, 24, 80)?;
        top.wait_for("all is well")?;
        kill(Pid::from_raw(i32::try_from(top.child.id())?), signal)?;
        let status = top.end()?;
        assert_eq!(status.code(), Some(code), "{signal}");
    }
    // Ctrl-C is a key there.
    let mut top = Terminal::start(&command(&server, &["top"])?, 24, 80)?;
    top.wait_for("all is well")?;
    top.type_in("\x03")?;
    let status = top.end()?;
    assert_eq!(status.code(), Some(0));
    Ok(())
}

#[test]
fn top_needs_a_terminal() -> Result<()> {
    let server = Server::start(Scene::new(1, 2))?;
    let refused = run(&server, &["top"])?;
    assert_eq!(refused.status.code(), Some(1));
    assert!(refused.output.contains("`paatp status --watch` needs none"), "{}", refused.output);
    Ok(())
}
