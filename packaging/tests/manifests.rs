//! Unit, manifests and container file: read and held to what they promise.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is the failure report here")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use paatp_tests::skip;
use paatp_user::engine::REQUIRED;
use serde_norway::Value;

/// Highest exposure that `systemd-analyze security` may find in the unit, in tenths: what version 252 measured.
const MOST_EXPOSURE: u32 = 22;

fn packaging() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(file: &str) -> String {
    let path = packaging().join(file);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn documents(file: &str) -> Vec<Value> {
    use serde::de::Deserialize;
    let text = read(file);
    serde_norway::Deserializer::from_str(&text).map(|one| Value::deserialize(one).unwrap()).collect()
}

fn texts(list: &Value) -> Vec<&str> {
    list.as_sequence().unwrap().iter().map(|value| value.as_str().unwrap()).collect()
}

fn short_names() -> Vec<&'static str> {
    REQUIRED.iter().map(|needed| needed.short_name()).collect()
}

#[test]
fn the_daemon_set_is_not_privileged() {
    let documents = documents("kubernetes/daemonset.yaml");
    let kinds: Vec<&str> = documents.iter().map(|document| document["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["ConfigMap", "DaemonSet"]);
    let pod = &documents[1]["spec"]["template"]["spec"];
    let containers = pod["containers"].as_sequence().unwrap();
    assert!(containers.len() == 1 && pod.get("initContainers").is_none());
    for forbidden in ["hostPID", "hostIPC"] {
        assert!(pod.get(forbidden).is_none(), "{forbidden}");
    }
    assert_eq!(pod["hostNetwork"], true);
    assert_eq!(pod["automountServiceAccountToken"], false);
    let container = &containers[0];
    let context = &container["securityContext"];
    assert_eq!(context["privileged"], false);
    assert_eq!(context["allowPrivilegeEscalation"], false);
    assert_eq!(context["readOnlyRootFilesystem"], true);
    assert_eq!(context["seccompProfile"]["type"], "RuntimeDefault");
    assert_eq!(texts(&context["capabilities"]["drop"]), ["ALL"]);
    assert_eq!(texts(&context["capabilities"]["add"]), short_names());
    for (probe, page) in
        [("startupProbe", "/healthz"), ("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")]
    {
        assert_eq!(container[probe]["httpGet"]["path"], page, "{probe}");
        assert_eq!(container[probe]["httpGet"]["port"], 20545, "{probe}");
    }
    let volumes = pod["volumes"].as_sequence().unwrap();
    let mounted: Vec<&str> = container["volumeMounts"]
        .as_sequence()
        .unwrap()
        .iter()
        .map(|mount| mount["name"].as_str().unwrap())
        .collect();
    let named: Vec<&str> = volumes.iter().map(|volume| volume["name"].as_str().unwrap()).collect();
    assert_eq!(mounted, named);
    let paths: Vec<&str> =
        volumes.iter().filter_map(|volume| volume.get("hostPath")?["path"].as_str()).collect();
    assert_eq!(paths, ["/var/lib/paatp", "/run/paatp", "/sys/fs/bpf"]);
}

/// The program takes the configuration, and the pod lives longer than its drain.
#[test]
fn the_daemon_sets_configuration_is_right() {
    let documents = documents("kubernetes/daemonset.yaml");
    let text = documents[0]["data"]["paatp.toml"].as_str().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("paatp.toml");
    fs::write(&path, text).unwrap();
    let checked = paatp_user::settings::check(&path);
    assert!(checked.is_ok(), "{checked:?}");
    let drain = text.lines().find_map(|line| line.strip_prefix("drain_timeout = ")).unwrap();
    let drain = paatp_user::duration::parse(drain.trim_matches('"')).unwrap();
    let grace = documents[1]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"].as_u64().unwrap();
    assert!(grace >= drain.as_secs() + 10, "{grace} {drain:?}");
}

#[test]
fn the_legacy_overlay_adds_one_capability() {
    let base = &documents("kubernetes/kustomization.yaml")[0];
    assert_eq!(texts(&base["resources"]), ["daemonset.yaml"]);
    let overlay = &documents("kubernetes/legacy/kustomization.yaml")[0];
    assert_eq!(texts(&overlay["resources"]), ["../"]);
    let patch: Value = serde_norway::from_str(overlay["patches"][0]["patch"].as_str().unwrap()).unwrap();
    let context = &patch["spec"]["template"]["spec"]["containers"][0]["securityContext"];
    let mut expected = short_names();
    expected.push("SYS_ADMIN");
    assert_eq!(texts(&context["capabilities"]["add"]), expected);
    assert!(context.get("privileged").is_none());
}

/// Nobody could build the image here: the file is read instead.
#[test]
fn the_container_file_has_no_shell() {
    let text = read("container/Containerfile").replace("\\\n", " ");
    let instructions: Vec<(&str, &str)> = text
        .lines()
        .filter(|line| !line.trim_start().starts_with('#') && !line.trim().is_empty())
        .map(|line| line.split_once(' ').unwrap())
        .collect();
    let all = |name: &str| -> Vec<&str> {
        instructions.iter().filter(|(instruction, _)| *instruction == name).map(|(_, rest)| *rest).collect()
    };
    let known = ["FROM", "ARG", "LABEL", "COPY", "USER", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT", "CMD"];
    assert!(instructions.iter().all(|(name, _)| known.contains(name)), "{instructions:?}");
    assert_eq!(all("FROM"), ["gcr.io/distroless/cc-debian12"]);
    for shell_form in all("ENTRYPOINT").iter().chain(&all("CMD")) {
        let list: Vec<String> = serde_norway::from_str(shell_form).unwrap();
        assert!(list.iter().all(|word| !word.contains("sh -c")));
    }
    for label in ["title", "description", "source", "licenses", "version", "revision"] {
        assert!(all("LABEL")[0].contains(&format!("org.opencontainers.image.{label}=")), "{label}");
    }
    assert_eq!(all("STOPSIGNAL"), ["SIGTERM"]);
}

#[test]
fn the_debian_changelog_begins_with_this_version() {
    let text = read("debian/changelog");
    let version = concat!("paatp (", env!("CARGO_PKG_VERSION"), "-1) ");
    assert!(text.starts_with(version), "{version}: {text}");
}

/// Sections of a unit with their settings; a key may come several times.
fn unit() -> BTreeMap<String, Vec<(String, String)>> {
    let mut sections: BTreeMap<String, Vec<(String, String)>> = BTreeMap::new();
    let mut section = String::new();
    for line in read("systemd/paatp.service").lines().map(str::trim) {
        if let Some(name) = line.strip_prefix('[') {
            section = name.trim_end_matches(']').to_owned();
        } else if !line.is_empty() && !line.starts_with('#') {
            let (key, value) = line.split_once('=').unwrap();
            sections.entry(section.clone()).or_default().push((key.to_owned(), value.to_owned()));
        }
    }
    sections
}

#[test]
fn the_unit_waits_for_ready_and_feeds_the_watchdog() {
    let unit = unit();
    let setting = |key: &str| {
        let found = unit["Service"].iter().find(|(name, _)| name == key);
        found.map(|(_, value)| value.as_str()).unwrap_or_default()
    };
    assert_eq!(setting("Type"), "notify");
    assert_eq!(setting("WatchdogSec"), "30");
    assert_eq!(setting("CapabilityBoundingSet"), REQUIRED.map(|needed| needed.name).join(" "));
    // A configuration that is wrong, and pins that do not fit, do not get better by trying again.
    let never: Vec<u8> =
        setting("RestartPreventExitStatus").split(' ').map(|status| status.parse().unwrap()).collect();
    use paatp_user::exit::Exit;
    assert_eq!(never, [Exit::Usage.status(), Exit::Incompatible.status()]);
    // This would take the pins away.
    for trap in ["ProtectKernelTunables", "PrivateBPF", "PrivateNetwork", "DynamicUser", "ProcSubset"] {
        assert_eq!(setting(trap), "", "{trap}");
    }
    let stop: u64 = setting("TimeoutStopSec").parse().unwrap();
    let drain = paatp_user::settings::list().into_iter().find(|setting| setting.flag == "drain-timeout");
    let drain = paatp_user::duration::parse(&drain.unwrap().default.unwrap()).unwrap();
    assert!(stop > drain.as_secs() + 10, "{stop} {drain:?}");
}

/// A copy of the unit for systemd's own tools, which want its program and its man page to be there.
fn unit_for_analysis() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("paatp.service");
    let text = read("systemd/paatp.service")
        .lines()
        .filter(|line| !line.starts_with("Documentation=man:"))
        .map(|line| line.replace("/usr/bin/paatp", "/bin/true") + "\n")
        .collect::<String>();
    fs::write(&path, text).unwrap();
    (folder, path)
}

fn has_systemd_analyze(test: &str) -> bool {
    let found =
        Command::new("systemd-analyze").arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        skip(test, "systemd-analyze is missing; it is in Debian's systemd");
    }
    found
}

#[test]
fn systemd_verifies_the_unit() {
    if !has_systemd_analyze("manifests::systemd_verifies_the_unit") {
        return;
    }
    let (_folder, path) = unit_for_analysis();
    let output = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path).output().unwrap();
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn the_units_exposure_does_not_rise() {
    if !has_systemd_analyze("manifests::the_units_exposure_does_not_rise") {
        return;
    }
    let (_folder, path) = unit_for_analysis();
    let output = Command::new("systemd-analyze")
        .args(["security", "--offline=true", "--no-pager", "--threshold", &MOST_EXPOSURE.to_string()])
        .arg(&path)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.lines().last().unwrap_or_default();
    println!("{last}");
    assert!(last.contains("Overall exposure level"), "{output:?}");
    assert!(output.status.success(), "{text}");
}
