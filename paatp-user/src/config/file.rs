//! The configuration file: TOML with a table `[node]`, whose keys are the options of `paatp run`, and tables `[[job]]`.
//!
//! What a key of `[node]` may hold is its option's business ([`crate::settings`]); here are lines, names and texts.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use toml::{Spanned, Value};

use crate::duration;

use super::{ConfigError, JobConfig, check};

/// Largest configuration file, in bytes: 64 jobs need a few KiB.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Largest number of changed letters in which a mistyped key is still recognised: one in three, and at least two.
const LETTERS_PER_TYPING_ERROR: usize = 3;
const MIN_TYPING_ERRORS: usize = 2;

/// A configuration file of the right shape, with checked jobs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct File {
    /// Where it was read.
    pub path: PathBuf,
    /// `[node]`, in the order of the lines.
    pub node: Vec<Entry>,
    /// The jobs.
    pub jobs: Vec<JobConfig>,
}

/// A key of `[node]` with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// The value or values, as a command line would have them.
    pub values: Vec<String>,
    /// The line, from 1.
    pub line: usize,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tables {
    #[serde(default)]
    node: BTreeMap<Spanned<String>, Value>,
    #[serde(default, rename = "job")]
    jobs: Vec<Spanned<JobConfig>>,
}

/// Reads a configuration file and checks its jobs, each by itself.
///
/// # Errors
/// If it cannot be read, is not of the right shape, or a job has a value that is not allowed.
pub fn read(path: &Path) -> Result<File, ConfigError> {
    let unreadable = |source| ConfigError::Read { path: path.into(), source };
    let length = std::fs::metadata(path).map_err(unreadable)?.len();
    if length > MAX_FILE_BYTES {
        return Err(ConfigError::Syntax {
            path: path.into(),
            message: format!("{length} bytes are more than a configuration has ({MAX_FILE_BYTES} at most)"),
        });
    }
    parse(path, &std::fs::read_to_string(path).map_err(unreadable)?)
}

fn parse(path: &Path, text: &str) -> Result<File, ConfigError> {
    let tables: Tables = toml::from_str(text).map_err(|error| {
        let mut message = error.to_string().trim_end().to_owned();
        message.push_str(&hint(error.message()));
        ConfigError::Syntax { path: path.into(), message }
    })?;
    let line = |offset: usize| text.bytes().take(offset).filter(|byte| *byte == b'\n').count() + 1;
    let mut file = File { path: path.into(), ..File::default() };
    for (key, value) in tables.node {
        let (line, key) = (line(key.span().start), key.into_inner());
        match texts(&value) {
            Some(values) => file.node.push(Entry { key, values, line }),
            None => {
                let message = format!("a text, a number or true/false is wanted, not {}", value.type_str());
                return Err(ConfigError::BadSetting { path: path.into(), line, key, message });
            }
        }
    }
    file.node.sort_by_key(|entry| entry.line);
    for job in tables.jobs {
        let line = line(job.span().start);
        let job = job.into_inner();
        let located = |source| ConfigError::InFile { path: path.into(), line, source: Box::new(source) };
        check(&job).map_err(located)?;
        file.jobs.push(job);
    }
    Ok(file)
}

/// A value as the command line would have it; nothing for what no option takes.
fn texts(value: &Value) -> Option<Vec<String>> {
    match value {
        Value::String(text) => Some(vec![text.clone()]),
        Value::Integer(number) => Some(vec![number.to_string()]),
        Value::Float(number) => Some(vec![number.to_string()]),
        Value::Boolean(flag) => Some(vec![flag.to_string()]),
        Value::Array(values) => {
            let each: Option<Vec<Vec<String>>> = values.iter().map(texts).collect();
            each.map(|values| values.concat())
        }
        Value::Datetime(_) | Value::Table(_) => None,
    }
}

/// What the key in serde's "unknown field `…`, expected one of `…`, `…`" was perhaps meant to be.
fn hint(message: &str) -> String {
    let quoted: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    match quoted.split_first() {
        Some((wrong, known)) if message.starts_with("unknown field") => nearest(wrong, known.iter().copied())
            .map(|key| format!("\ndid you mean `{key}`?"))
            .unwrap_or_default(),
        _ => String::new(),
    }
}

/// The known word that a mistyped one was perhaps meant to be.
#[must_use]
pub fn nearest<'a>(wrong: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let most = (wrong.chars().count() / LETTERS_PER_TYPING_ERROR).max(MIN_TYPING_ERRORS);
    known
        .into_iter()
        .map(|word| (strsim::damerau_levenshtein(wrong, word), word))
        .filter(|(distance, _)| *distance <= most)
        .min()
        .map(|(_, word)| word)
}

/// Seconds as a number, or a duration with its unit as text.
pub(super) fn seconds<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written {
        Seconds(f64),
        Text(String),
        Absent(()),
    }
    match Written::deserialize(deserializer)? {
        Written::Seconds(seconds) => Ok(Some(seconds)),
        Written::Text(text) => {
            duration::parse(&text).map(|time| Some(time.as_secs_f64())).map_err(D::Error::custom)
        }
        Written::Absent(()) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Access, FailurePolicy};

    fn read_text(text: &str) -> Result<File, String> {
        parse(Path::new("jobs.toml"), text).map_err(|error| error.to_string())
    }

    fn refusal(text: &str) -> String {
        read_text(text).err().unwrap_or_else(|| format!("accepted: {text}"))
    }

    #[test]
    fn jobs_have_defaults_and_no_unknown_keys() {
        let file = read_text("[[job]]\nname = \"train\"\nworld = 4\n").unwrap_or_default();
        assert_eq!(file.jobs, vec![JobConfig::new("train", 4)]);
        let message = refusal("[[job]]\nname = \"train\"\nworlds = 4\n");
        assert!(message.contains("worlds") && message.contains("did you mean `world`?"), "{message}");
        assert!(message.starts_with("jobs.toml") && message.contains("line 3"), "{message}");
        let message = refusal("[nod]\nmemory = 1\n");
        assert!(message.contains("line 1") && message.contains("did you mean `node`?"), "{message}");
        assert!(!refusal("[elsewhere]\n").contains("did you mean"));
        assert!(refusal("[[job]]\nname = \"a\"\nworld = -1\n").contains("line 3"));
        assert_eq!(read_text("").map(|file| (file.node, file.jobs)), Ok((vec![], vec![])));
        let more = "[[job]]\nname = \"a\"\nworld = 2\naccess = \"token\"\ntimeout_seconds = 5\non_failure = \"shrink\"\n";
        let expected = JobConfig {
            access: Some(Access::Token),
            timeout_seconds: Some(5.0),
            on_failure: FailurePolicy::Shrink,
            ..JobConfig::new("a", 2)
        };
        assert_eq!(read_text(more).map(|file| file.jobs), Ok(vec![expected.clone()]));
        let with_unit = more.replace("timeout_seconds = 5", "timeout = \"5s\"");
        assert_eq!(read_text(&with_unit).map(|file| file.jobs), Ok(vec![expected]));
        assert!(refusal(&with_unit.replace("5s", "5 parsecs")).contains("5 parsecs"));
    }

    #[test]
    fn values_out_of_range_have_their_line() {
        let message = refusal("\n[[job]]\nname = \"a\"\nworld = 2\n\n[[job]]\nname = \"b\"\nworld = 65\n");
        assert!(message.starts_with("jobs.toml:6: job `b`: world = 65"), "{message}");
    }

    #[test]
    fn node_keys_keep_lines_and_texts() {
        let text = "[node]\nport = 7\nmemory = \"2MiB\"\n# a remark\nquick = true\nlist = [\"a\", 2]\n";
        let entry = |key: &str, values: &[&str], line| Entry {
            key: key.into(),
            values: values.iter().map(|value| (*value).into()).collect(),
            line,
        };
        let expected = vec![
            entry("port", &["7"], 2),
            entry("memory", &["2MiB"], 3),
            entry("quick", &["true"], 5),
            entry("list", &["a", "2"], 6),
        ];
        assert_eq!(read_text(text).map(|file| file.node), Ok(expected));
        let message = refusal("[node]\nport = 1979-05-27\n");
        assert!(message.starts_with("jobs.toml:2: port:") && message.contains("datetime"), "{message}");
    }

    #[test]
    fn missing_and_huge_files_are_named() {
        let error = read(Path::new("/nonexistent/x.toml")).map_err(|e| e.to_string());
        assert!(error.is_err_and(|message| message.contains("/nonexistent/x.toml")));
        let folder = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
        let path = folder.path().join("large.toml");
        assert!(std::fs::write(&path, " ".repeat(1 + (1 << 20))).is_ok());
        assert!(read(&path).is_err_and(|error| error.to_string().contains("1048577 bytes")));
    }

    #[test]
    fn near_words_are_found() {
        let known = ["iface", "port", "ports", "drain_timeout"];
        let near = |wrong| nearest(wrong, known);
        assert_eq!(
            (near("ifcae"), near("prot"), near("port_s")),
            (Some("iface"), Some("port"), Some("ports"))
        );
        assert_eq!((near("draintime"), near("something")), (None, None));
        assert_eq!(near("drain_time_out"), Some("drain_timeout"));
    }
}
