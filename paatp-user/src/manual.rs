//! Man pages and shell completions, made from the definition of the command line.

use std::fs;
use std::io;
use std::path::Path;

use clap::Args;
use clap_complete::Shell;
use clap_mangen::Man as Page;
use thiserror::Error;

use crate::config::nearest;
use crate::settings;

/// Shells that packages bring completions for.
const PACKAGED: [Shell; 3] = [Shell::Bash, Shell::Zsh, Shell::Fish];

/// After the options of `paatp completions`.
pub const AFTER_COMPLETIONS: &str = "\
Packages install them. Elsewhere:
  paatp completions bash > ~/.local/share/bash-completion/completions/paatp
  paatp completions fish > ~/.config/fish/completions/paatp.fish
  paatp completions zsh > DIRECTORY/_paatp, in a directory of $fpath

Exit status: 0 written, 2 called wrongly.";

/// After the options of `paatp man`.
pub const AFTER_MAN: &str = "\
Packages install all pages. Elsewhere:
  paatp man | man -l -
  paatp man job create | man -l -

Exit status: 0 written, 2 there is no such command.";

/// `paatp completions`
#[derive(Debug, Args)]
pub struct Completions {
    /// The shell.
    #[arg(value_enum)]
    pub shell: Shell,
}

/// `paatp man`
#[derive(Debug, Args)]
pub struct Man {
    /// The command, as it is called: `job create`; without one the page of `paatp` itself.
    #[arg(value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// There is no such page.
#[derive(Debug, Error)]
pub enum ManualError {
    /// No such command.
    #[error("paatp has no command `{command}`{hint}; `paatp --help` lists all")]
    Unknown {
        /// What was asked for.
        command: String,
        /// A name that may have been meant.
        hint: String,
    },
    /// The page cannot be made.
    #[error("cannot make the page")]
    Render(#[from] io::Error),
}

/// The completions for a shell.
#[must_use]
pub fn completions(shell: Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut settings::command(), "paatp", &mut script);
    script
}

/// The page of a command, in roff.
///
/// # Errors
/// If there is no such command.
pub fn page(words: &[String]) -> Result<Vec<u8>, ManualError> {
    let mut all = settings::command().disable_help_subcommand(true);
    // Gives each its whole name.
    all.build();
    let mut found = &all;
    for (place, word) in words.iter().enumerate() {
        found = found.find_subcommand(word).ok_or_else(|| ManualError::Unknown {
            command: words.get(..=place).unwrap_or(words).join(" "),
            hint: nearest(word, found.get_subcommands().map(clap::Command::get_name))
                .map_or_else(String::new, |name| format!("; did you mean `{name}`?")),
        })?;
    }
    let mut page = Vec::new();
    Page::new(found.clone()).render(&mut page)?;
    Ok(page)
}

/// Writes all pages to `man/` and completions to `completions/` below a folder.
///
/// # Errors
/// If they cannot be written.
pub fn write_all(folder: &Path) -> io::Result<()> {
    let (man, completions) = (folder.join("man"), folder.join("completions"));
    fs::create_dir_all(&man)?;
    fs::create_dir_all(&completions)?;
    clap_mangen::generate_to(settings::command(), &man)?;
    for shell in PACKAGED {
        clap_complete::generate_to(shell, &mut settings::command(), "paatp", &completions)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is printed is what packages install.
    #[test]
    fn pages_and_completions_are_those_of_packages() {
        let folder = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
        assert!(write_all(folder.path()).is_ok());
        let read = |name: &str| fs::read(folder.path().join(name)).unwrap_or_else(|error| panic!("{error}"));
        for (file, words) in
            [("paatp.1", &[][..]), ("paatp-run.1", &["run"]), ("paatp-job-create.1", &["job", "create"])]
        {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            let printed = page(&words).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(
                String::from_utf8_lossy(&printed),
                String::from_utf8_lossy(&read(&format!("man/{file}")))
            );
        }
        assert_eq!(completions(Shell::Bash), read("completions/paatp.bash"));
    }

    #[test]
    fn unknown_commands_have_a_hint() {
        let words = ["job".to_owned(), "craete".to_owned()];
        let message = page(&words).map_err(|error| error.to_string()).err().unwrap_or_default();
        assert!(message.contains("no command `job craete`; did you mean `create`?"), "{message}");
    }
}
