//! A headless Chromium, driven over its debugging pipe: messages of JSON with a zero byte after each, the DevTools
//! protocol. No driver, no port, no WebSocket.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Names of the program, the lightest first.
const PROGRAMS: [&str; 3] = ["chromium-headless-shell", "chromium", "google-chrome"];
/// Longest wait for an answer of the browser: machines that run tests are busy.
const ANSWER_DEADLINE: Duration = Duration::from_secs(60);
/// How often a condition in the page is looked at.
const GLANCE: Duration = Duration::from_millis(50);

/// What the browser is started with: no window, no profile but an empty one, nothing fetched by itself.
const OPTIONS: [&str; 10] = [
    "--headless",
    // Tests run as root, where Chromium's sandbox does not.
    "--no-sandbox",
    "--disable-gpu",
    // Containers have 64 MiB there.
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
    "about:blank",
];

/// Runs in each page before its own script: keeps what the protocol does not tell.
const WITNESS: &str = "\
window.violations = [];
addEventListener('securitypolicyviolation', (event) => \
violations.push(`${event.violatedDirective} ${event.blockedURI} ${event.sample}`));
window.longTasks = [];
new PerformanceObserver((list) => longTasks.push(...list.getEntries().map((task) => task.duration)))\
.observe({ type: 'longtask', buffered: true });";

/// Where a Chromium is, if there is one.
#[must_use]
pub fn find() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    PROGRAMS.iter().find_map(|name| folders.iter().map(|folder| folder.join(name)).find(|p| p.is_file()))
}

/// What a screen is like.
#[derive(Clone, Copy, Debug)]
pub struct Screen {
    /// Width in CSS pixels.
    pub width: u32,
    /// Height in CSS pixels.
    pub height: u32,
    /// Pixels for one of CSS.
    pub scale: f64,
    /// `light` or `dark`.
    pub scheme: &'static str,
}

impl Screen {
    /// A laptop in daylight.
    pub const LAPTOP: Screen = Screen { width: 1280, height: 900, scale: 1.0, scheme: "light" };
}

/// A browser with one page. Dropping it kills it.
#[derive(Debug)]
pub struct Browser {
    child: Child,
    input: ChildStdin,
    messages: Receiver<Value>,
    session: String,
    last: u64,
    problems: Vec<String>,
    _profile: TempDir,
}

impl Browser {
    /// Starts `program`; `command` makes commands, for example inside a network namespace.
    ///
    /// # Errors
    /// Where it does not start or does not speak the protocol.
    pub fn start(program: &Path, command: impl FnOnce(&OsStr) -> Command) -> Result<Browser> {
        let profile = tempfile::Builder::new().prefix("paatp-browser-").tempdir()?;
        // The pipe is descriptors 3 and 4. A shell moves them there without any unsafe code.
        let mut command = command(OsStr::new("/bin/sh"));
        command
            .args(["-c", "exec \"$0\" \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>&1"])
            .arg(program)
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .args(OPTIONS)
            .env("HOME", profile.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            // It has children of its own.
            .process_group(0);
        let mut child = command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
        let (input, output) =
            child.stdin.take().zip(child.stdout.take()).context("no pipe to the browser")?;
        let (sender, messages) = channel();
        thread::spawn(move || {
            let mut output = BufReader::new(output);
            let mut message = Vec::new();
            while output.read_until(0, &mut message).is_ok_and(|bytes| bytes > 0) {
                message.pop();
                let Ok(value) = serde_json::from_slice(&message) else { break };
                if sender.send(value).is_err() {
                    break;
                }
                message.clear();
            }
        });
        let mut browser = Browser {
            child,
            input,
            messages,
            session: String::new(),
            last: 0,
            problems: Vec::new(),
            _profile: profile,
        };
        browser.attach()?;
        Ok(browser)
    }

    fn attach(&mut self) -> Result<()> {
        let target = self.call("Target.createTarget", json!({ "url": "about:blank" }))?;
        let params = json!({ "targetId": target["targetId"], "flatten": true });
        let attached = self.call("Target.attachToTarget", params)?;
        self.session = attached["sessionId"].as_str().context("the browser names no session")?.to_owned();
        for domain in ["Page", "Runtime", "Log", "Accessibility"] {
            self.call(&format!("{domain}.enable"), json!({}))?;
        }
        self.call("Page.addScriptToEvaluateOnNewDocument", json!({ "source": WITNESS }))?;
        self.show_on(Screen::LAPTOP)
    }

    /// Asks the browser something; returns its result.
    ///
    /// # Errors
    /// Where it refuses, has ended, or does not answer.
    pub fn call(&mut self, method: &str, params: Value) -> Result<Value> {
        self.last += 1;
        let id = self.last;
        let mut message = json!({ "id": id, "method": method, "params": params });
        if !self.session.is_empty() {
            message["sessionId"] = json!(self.session);
        }
        let mut bytes = serde_json::to_vec(&message)?;
        bytes.push(0);
        self.input.write_all(&bytes).and_then(|()| self.input.flush()).context("the browser has ended")?;
        let end = Instant::now() + ANSWER_DEADLINE;
        loop {
            let message = match self.messages.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(message) => message,
                Err(RecvTimeoutError::Timeout) => bail!("the browser does not answer {method}"),
                Err(RecvTimeoutError::Disconnected) => bail!("the browser ended during {method}"),
            };
            if message["id"] != json!(id) {
                self.note(&message);
                continue;
            }
            ensure!(message["error"].is_null(), "the browser refuses {method}: {}", message["error"]);
            return Ok(message["result"].clone());
        }
    }

    /// Keeps errors and warnings.
    fn note(&mut self, event: &Value) {
        let params = &event["params"];
        let text = match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => format!("exception: {}", params["exceptionDetails"]),
            Some("Runtime.consoleAPICalled") if params["type"] == "error" || params["type"] == "warning" => {
                format!("console: {}", params["args"])
            }
            Some("Log.entryAdded") if params["entry"]["level"] == "error" => {
                let entry = &params["entry"];
                format!("log of {}: {} {}", entry["source"], entry["text"], entry["url"])
            }
            _ => return,
        };
        self.problems.push(text);
    }

    /// Sets size and colours.
    ///
    /// # Errors
    /// As [`Browser::call`].
    pub fn show_on(&mut self, screen: Screen) -> Result<()> {
        let Screen { width, height, scale, scheme } = screen;
        let params = json!({ "width": width, "height": height, "deviceScaleFactor": scale, "mobile": false });
        self.call("Emulation.setDeviceMetricsOverride", params)?;
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        self.call("Emulation.setEmulatedMedia", json!({ "features": features })).map(drop)
    }

    /// Goes to an address.
    ///
    /// # Errors
    /// Where nobody answers there.
    pub fn open(&mut self, url: &str) -> Result<()> {
        let navigated = self.call("Page.navigate", json!({ "url": url }))?;
        ensure!(navigated["errorText"].is_null(), "cannot open {url}: {}", navigated["errorText"]);
        self.wait_for("the page was there", "document.readyState === 'complete'")
    }

    /// The value of an expression in the page.
    ///
    /// # Errors
    /// Where it throws.
    pub fn value(&mut self, expression: &str) -> Result<Value> {
        let params = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let answer = self.call("Runtime.evaluate", params)?;
        ensure!(answer["exceptionDetails"].is_null(), "{expression}: {}", answer["exceptionDetails"]);
        Ok(answer["result"]["value"].clone())
    }

    /// The same, as text.
    ///
    /// # Errors
    /// Where it throws or is no text.
    pub fn text(&mut self, expression: &str) -> Result<String> {
        let value = self.value(expression)?;
        value.as_str().map(str::to_owned).with_context(|| format!("{expression} is no text but {value}"))
    }

    /// Waits until an expression is true.
    ///
    /// # Errors
    /// Where it does not get so, or throws.
    pub fn wait_for(&mut self, what: &str, expression: &str) -> Result<()> {
        let end = Instant::now() + ANSWER_DEADLINE;
        while self.value(expression)? != json!(true) {
            if Instant::now() >= end {
                let shown = self.text("document.body.innerText").unwrap_or_default();
                bail!("waited in vain until {what}; problems: {:?}; the page shows:\n{shown}", self.problems);
            }
            thread::sleep(GLANCE);
        }
        Ok(())
    }

    /// Presses a key, by its name (`Tab`, `ArrowDown`, `Enter`).
    ///
    /// # Errors
    /// As [`Browser::call`].
    pub fn press(&mut self, key: &str) -> Result<()> {
        let code = match key {
            "Tab" => 9,
            "Enter" => 13,
            "End" => 35,
            "Home" => 36,
            "ArrowUp" => 38,
            "ArrowDown" => 40,
            _ => bail!("no code for the key {key}"),
        };
        let mut down = json!({ "type": "keyDown", "key": key, "code": key, "windowsVirtualKeyCode": code });
        if key == "Enter" {
            down["text"] = json!("\r");
        }
        self.call("Input.dispatchKeyEvent", down)?;
        let up = json!({ "type": "keyUp", "key": key, "code": key, "windowsVirtualKeyCode": code });
        self.call("Input.dispatchKeyEvent", up).map(drop)
    }

    /// Roles and names as a screen reader gets them, in order.
    ///
    /// # Errors
    /// As [`Browser::call`].
    pub fn accessible(&mut self) -> Result<Vec<(String, String)>> {
        let tree = self.call("Accessibility.getFullAXTree", json!({}))?;
        let nodes = tree["nodes"].as_array().context("no accessibility tree")?;
        let text = |value: &Value| value["value"].as_str().unwrap_or_default().to_owned();
        let seen = nodes.iter().filter(|node| node["ignored"] != json!(true));
        Ok(seen.map(|node| (text(&node["role"]), text(&node["name"]))).collect())
    }

    /// What is on the screen, as PNG.
    ///
    /// # Errors
    /// As [`Browser::call`].
    pub fn screenshot(&mut self) -> Result<Vec<u8>> {
        let shot = self.call("Page.captureScreenshot", json!({ "format": "png" }))?;
        Ok(BASE64_STANDARD.decode(shot["data"].as_str().context("no picture")?)?)
    }

    /// Errors, exceptions and breaches of the page's policy so far; forgets them.
    ///
    /// # Errors
    /// As [`Browser::call`].
    pub fn problems(&mut self) -> Result<Vec<String>> {
        // What was said before this answer is here then.
        let violations = self.value("violations.splice(0)")?;
        let violations = violations.as_array().cloned().unwrap_or_default();
        let mut problems = std::mem::take(&mut self.problems);
        problems.extend(violations.iter().map(|violation| format!("breach of policy: {violation}")));
        Ok(problems)
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        if let Ok(group) = i32::try_from(self.child.id()) {
            let _ = nix::sys::signal::killpg(
                nix::unistd::Pid::from_raw(group),
                nix::sys::signal::Signal::SIGKILL,
            );
        }
        let _ = self.child.wait();
    }
}
