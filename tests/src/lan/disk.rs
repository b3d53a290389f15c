//! A disk of one's own: a file system in a file, that can be filled up and that can fail.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::switch::{compile, compile_dir};
use super::{LabError, run};

/// A mounted disk; unmounted and removed when dropped.
#[derive(Debug)]
pub struct Disk {
    mount: PathBuf,
    device: String,
    tools: tempfile::TempDir,
}

impl Disk {
    /// Makes a disk of `bytes` and mounts it at `mount`, which is created.
    ///
    /// # Errors
    /// [`LabError`], where no loop device can be used.
    pub fn make(mount: &Path, bytes: u64) -> Result<Self, LabError> {
        let tools = compile_dir()?;
        compile(tools.path(), "shorten", include_str!("shorten.c"))?;
        let image = tools.path().join("image");
        let file = std::fs::File::create(&image).map_err(|e| LabError::file(&image, e))?;
        file.set_len(bytes).map_err(|e| LabError::file(&image, e))?;
        drop(file);
        // Without a journal, so that the file system outlives a time of errors.
        let mut make = Command::new("mkfs.ext4");
        run(make.args(["-q", "-b", "4096", "-m", "0", "-O", "^has_journal"]).arg(&image))?;
        std::fs::create_dir_all(mount).map_err(|e| LabError::file(mount, e))?;
        run(Command::new("mount").args(["-o", "loop,errors=continue"]).arg(&image).arg(mount))?;
        let mount = std::fs::canonicalize(mount).map_err(|e| LabError::file(mount, e))?;
        let mut disk = Self { mount, device: String::new(), tools };
        disk.device = mounts()
            .into_iter()
            .find_map(|(device, at)| (at == disk.mount).then_some(device))
            .ok_or_else(|| LabError::Unsupported(format!("{} is not mounted", disk.mount.display())))?;
        Ok(disk)
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.mount
    }

    /// From now on, or no longer, everything but the beginning of the disk cannot be read or written
    /// (EIO). What is in memory can still be read.
    ///
    /// # Errors
    /// [`LabError`].
    pub fn fail(&self, failing: bool) -> Result<(), LabError> {
        let limit = if failing { "4096" } else { "0" };
        run(Command::new(self.tools.path().join("shorten")).arg(&self.device).arg(limit)).map(drop)
    }

    /// Takes all the space that is free now.
    ///
    /// # Errors
    /// [`LabError`].
    pub fn fill(&self) -> Result<(), LabError> {
        let path = self.ballast();
        let failed = |e: std::io::Error| LabError::file(&path, e);
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(&path).map_err(failed)?;
        let block = vec![0u8; 4096];
        loop {
            match std::io::Write::write_all(&mut file, &block) {
                Ok(()) => {}
                Err(e) if e.kind() == std::io::ErrorKind::StorageFull => return Ok(()),
                Err(e) => return Err(failed(e)),
            }
        }
    }

    /// Gives it back.
    ///
    /// # Errors
    /// [`LabError`].
    pub fn free(&self) -> Result<(), LabError> {
        let path = self.ballast();
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(LabError::file(&path, e)),
            _ => Ok(()),
        }
    }

    fn ballast(&self) -> PathBuf {
        self.mount.join("ballast")
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Programs that were killed a moment ago may still hold it: lazily, it goes when they do.
        if let Err(error) = run(Command::new("umount").arg("-l").arg(&self.mount)) {
            eprintln!("{error}");
        }
    }
}

/// Devices and where they are mounted.
fn mounts() -> Vec<(String, PathBuf)> {
    let text = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let parse = |line: &str| {
        let mut words = line.split(' ');
        Some((words.next()?.to_owned(), PathBuf::from(words.next()?)))
    };
    text.lines().filter_map(parse).collect()
}

/// Unmounts every disk of a lab that `chosen` picks by its place.
pub(super) fn unmount_where(chosen: &dyn Fn(&Path) -> bool) {
    for (device, mount) in mounts() {
        if device.starts_with("/dev/loop") && chosen(&mount) {
            let _ = run(Command::new("umount").arg("-l").arg(&mount));
        }
    }
}
