//! Puts the git hash into `--version`; a source tree without git says so instead of failing.

use std::path::Path;
use std::process::Command;

fn main() {
    let hash = git(&["rev-parse", "--short=10", "HEAD"]).unwrap_or_else(|| "no git".to_owned());
    let dirty = git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|s| !s.is_empty());
    println!("cargo:rustc-env=SHIMMER_GIT_HASH={hash}{}", if dirty { "+" } else { "" });
    println!("cargo:rerun-if-changed=build.rs");
    // Debug builds do not relink on every commit; release builds say exactly what they hold.
    let file = if std::env::var("PROFILE").is_ok_and(|p| p == "debug") { "HEAD" } else { "logs/HEAD" };
    if let Some(path) = git(&["rev-parse", "--git-path", file]).filter(|p| Path::new(p).exists()) {
        println!("cargo:rerun-if-changed={path}");
    }
}

fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok()?;
    if !output.status.success() {
        return None;
    }
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}
