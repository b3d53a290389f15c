//! Errors of commands and the exit codes they map to.

use std::process::ExitCode;

use shimmer_common::container::ContainerError;
use shimmer_common::experts::ExpertError;
use shimmer_common::experts::pack::PackError;
use shimmer_common::ffn::FfnError;
use shimmer_common::measure::MeasureError;

use crate::cluster::ClusterError;
use crate::decode::DecodeError;
use crate::model::ModelError;
use crate::text::TextError;

/// Why a command ended without doing its work. The message is one sentence for a person.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// Something else failed (exit code 1).
    #[error("{0}")]
    Failed(String),
    /// Flags, environment or configuration file are wrong (exit code 2).
    #[error("{0}")]
    Usage(String),
    /// Model or data on disk is damaged, missing or unsupported (exit code 3).
    #[error("{0}")]
    Data(String),
    /// A node or the coordinator cannot be reached (exit code 4).
    #[error("{0}")]
    Unreachable(String),
    /// Ctrl-C (exit code 130).
    #[error("interrupted")]
    Interrupted,
    /// The reader of stdout went away; not worth a message.
    #[error("stdout was closed")]
    BrokenPipe,
}

impl CliError {
    /// The documented exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Failed(_) => 1,
            Self::Usage(_) => 2,
            Self::Data(_) => 3,
            Self::Unreachable(_) => 4,
            Self::Interrupted => 130,
            Self::BrokenPipe => 0,
        }
    }

    /// Prints the message (if there is one to print) on stderr and returns the exit code.
    pub fn report(&self) -> ExitCode {
        match self {
            Self::BrokenPipe => {}
            Self::Interrupted => super::output::note("interrupted"),
            other => super::output::note(&format!("error: {other}")),
        }
        ExitCode::from(self.exit_code())
    }

    /// Maps an I/O error on `what` (a file, a directory); a closed stdout is told apart by
    /// [`super::output`].
    pub fn io(what: impl std::fmt::Display, source: &std::io::Error) -> Self {
        Self::Failed(format!("{what}: {source}"))
    }
}

impl From<ContainerError> for CliError {
    fn from(error: ContainerError) -> Self {
        Self::Data(error.to_string())
    }
}

impl From<TextError> for CliError {
    fn from(error: TextError) -> Self {
        match error {
            TextError::File { .. } => Self::Data(error.to_string()),
            other => Self::Failed(other.to_string()),
        }
    }
}

impl From<ExpertError> for CliError {
    fn from(error: ExpertError) -> Self {
        let message = error.to_string();
        match error {
            ExpertError::Unreachable(_) => Self::Unreachable(message),
            ExpertError::Budget { .. } => Self::Usage(message),
            ExpertError::Missing { .. } | ExpertError::Read { .. } | ExpertError::Damaged { .. } => {
                Self::Data(message)
            }
            ExpertError::Compute { source: FfnError::Fixed(_), .. } => Self::Data(format!(
                "{message}; the model's weights are damaged, check them with `shimmer doctor --deep`"
            )),
            ExpertError::Compute { .. } | ExpertError::Unfit { .. } => Self::Failed(message),
        }
    }
}

impl From<MeasureError> for CliError {
    fn from(error: MeasureError) -> Self {
        let message = error.to_string();
        match error {
            MeasureError::Nothing(_) => Self::Data(message),
            MeasureError::Expert(error) => error.into(),
            MeasureError::Read(_) | MeasureError::Io { .. } => Self::Failed(message),
        }
    }
}

impl From<PackError> for CliError {
    fn from(error: PackError) -> Self {
        let message = error.to_string();
        match error {
            PackError::Expert(expert) => expert.into(),
            PackError::Cancelled => Self::Interrupted,
            PackError::Io { .. } | PackError::Space { .. } => Self::Failed(message),
            PackError::Occupied { .. } => Self::Usage(message),
            _ => Self::Data(message),
        }
    }
}

impl From<ModelError> for CliError {
    fn from(error: ModelError) -> Self {
        match error {
            ModelError::Expert(expert) => expert.into(),
            ModelError::ContextExceeded { .. } | ModelError::UnknownToken { .. } => {
                Self::Usage(error.to_string())
            }
        }
    }
}

impl From<DecodeError> for CliError {
    fn from(error: DecodeError) -> Self {
        match error {
            DecodeError::Model(model) => model.into(),
            DecodeError::EmptyPrompt => Self::Usage(error.to_string()),
            other => Self::Data(other.to_string()),
        }
    }
}

impl From<ClusterError> for CliError {
    fn from(error: ClusterError) -> Self {
        let message = error.to_string();
        match error {
            ClusterError::State { .. } => Self::Data(message),
            ClusterError::Node { .. } => Self::Unreachable(message),
            ClusterError::Busy { .. } | ClusterError::Listen { .. } => Self::Failed(message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_follow_the_kind_of_failure() {
        let budget = ExpertError::Budget { budget_bytes: 1, needed_bytes: 2 };
        assert_eq!(CliError::from(budget).exit_code(), 2);
        let damaged =
            ContainerError::Config { path: "config.json".into(), what: "hidden_size is missing".into() };
        let error = CliError::from(damaged);
        assert_eq!(error.exit_code(), 3);
        assert_eq!(error.to_string(), "config.json: hidden_size is missing");
        assert_eq!(CliError::from(ExpertError::Unreachable("node a".into())).exit_code(), 4);
        assert_eq!(CliError::Interrupted.exit_code(), 130);
    }
}
