//! Errors of model files: every problem names file and tensor.

use std::path::PathBuf;

/// One thing wrong with a model directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// File it concerns, if one.
    pub file: Option<PathBuf>,
    /// Tensor or config key it concerns, if one.
    pub tensor: Option<String>,
    /// What is wrong and what was expected.
    pub what: String,
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(file) = &self.file {
            write!(f, "{}: ", file.display())?;
        }
        if let Some(tensor) = &self.tensor {
            write!(f, "{tensor}: ")?;
        }
        f.write_str(&self.what)
    }
}

/// Why a model directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ContainerError {
    /// A file cannot be opened or read.
    #[error("cannot read {path}: {source}")]
    Io {
        /// File or directory.
        path: PathBuf,
        /// Operating system error.
        source: std::io::Error,
    },
    /// `config.json` is malformed, out of range or of an unsupported kind.
    #[error("{path}: {what}")]
    Config {
        /// The config file.
        path: PathBuf,
        /// Key, value and what is supported.
        what: String,
    },
    /// Tensors are missing, odd, duplicate or truncated: all of them.
    #[error("{}", list(.0))]
    Damaged(Vec<Problem>),
}

/// Longer lists are cut when shown; [`ContainerError::Damaged`] holds all of them.
const SHOWN_PROBLEMS: usize = 100;

fn list(problems: &[Problem]) -> String {
    if let [one] = problems {
        return one.to_string();
    }
    let mut text = format!("the model has {} problems:", problems.len());
    for problem in problems.iter().take(SHOWN_PROBLEMS) {
        text.push_str("\n  ");
        text.push_str(&problem.to_string());
    }
    if problems.len() > SHOWN_PROBLEMS {
        text.push_str(&format!("\n  and {} more", problems.len() - SHOWN_PROBLEMS));
    }
    text
}
