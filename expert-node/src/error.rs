//! What can go wrong on a node, and the exit code each kind has.

use std::path::PathBuf;

use crate::token::TokenError;

/// Why a node cannot join, start or go on.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The join token cannot be used.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// The coordinator refused, and said why.
    #[error("{0}")]
    Refused(String),
    /// Another process has this node's identity, as the coordinator sees it.
    #[error("{0}")]
    Twin(String),
    /// Model, protocol or numeric profile differ.
    #[error("{0}")]
    Mismatch(String),
    /// The coordinator does not answer.
    #[error(
        "cannot reach the coordinator ({what}); is `shimmer serve --cluster DIR` running there, and does its firewall let this port in?"
    )]
    Unreachable {
        /// Every address tried and why it failed.
        what: String,
    },
    /// The data directory is missing, damaged or in use.
    #[error("{path}: {what}")]
    Data {
        /// File or directory.
        path: PathBuf,
        /// What is wrong and the remedy.
        what: String,
    },
    /// A file of the data directory cannot be read or written.
    #[error("cannot {action} {path}: {source}")]
    File {
        /// "read", "write", "create", "lock" or "use".
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Operating system error.
        source: std::io::Error,
    },
    /// The address to serve on cannot be bound.
    #[error(
        "cannot listen on {address}: {source}; stop what uses it (this node, already running?) or join with another --listen"
    )]
    Listen {
        /// The address.
        address: String,
        /// Operating system error.
        source: std::io::Error,
    },
    /// The experts cannot be served.
    #[error(transparent)]
    Experts(#[from] shimmer_common::experts::ExpertError),
    /// The pack or shard cannot be used.
    #[error(transparent)]
    Pack(#[from] shimmer_common::experts::pack::PackError),
    /// A flag's value cannot be used.
    #[error("{0}")]
    Usage(String),
    /// This machine cannot do what is needed (keys, threads, runtime).
    #[error("{what}: {cause}")]
    Machine {
        /// What was attempted.
        what: &'static str,
        /// Why it failed.
        cause: String,
    },
}

impl NodeError {
    /// Exit code of the process: 1 failed, 2 usage, 3 data damaged or unsupported, 4 cannot reach.
    pub fn exit_code(&self) -> u8 {
        match self {
            NodeError::Usage(_) => 2,
            NodeError::Mismatch(_) | NodeError::Data { .. } | NodeError::Experts(_) | NodeError::Pack(_) => 3,
            NodeError::Unreachable { .. } => 4,
            NodeError::Token(_)
            | NodeError::Refused(_)
            | NodeError::Twin(_)
            | NodeError::File { .. }
            | NodeError::Listen { .. }
            | NodeError::Machine { .. } => 1,
        }
    }
}
