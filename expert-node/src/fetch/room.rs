//! Room on the disk: looked at before anything is fetched, and named when it runs out.

use shimmer_common::disk::free_bytes;
use shimmer_common::experts::pack::PackError;
use shimmer_common::size::Size;

use super::Context;

/// Room left on the disk beside the records, and a hundredth of them for the file system's own needs.
const SPARE_BYTES: u64 = 64 << 20;

/// Whether the disk has room for `missing` bytes of records.
pub(super) fn check_room(context: &Context, missing: u64) -> Result<(), String> {
    let dir = context.records.store().dir();
    let free =
        free_bytes(dir).map_err(|e| format!("the free space of {} is not known: {e}", dir.display()))?;
    enough_room(missing, free).map_err(|what| format!("{}: {what}", dir.display()))
}

/// Bytes of records that `free` bytes of a disk have room for.
pub(crate) fn room_for_records(free: u64) -> u64 {
    free.saturating_sub(SPARE_BYTES) / 101 * 100
}

/// Whether `missing` bytes of records fit beside what else a disk needs.
fn enough_room(missing: u64, free: u64) -> Result<(), String> {
    let needed = missing.saturating_add(missing / 100).saturating_add(SPARE_BYTES);
    if needed <= free {
        return Ok(());
    }
    Err(format!(
        "{} ({needed} bytes) are needed for the missing experts, {} ({free} bytes) are free; free some space, or join with --data on a larger disk",
        Size(needed),
        Size(free)
    ))
}

/// Says what a full or broken disk means.
pub(super) fn store_problem(context: &Context, error: &PackError) -> String {
    let full =
        matches!(error, PackError::Io { source, .. } if source.kind() == std::io::ErrorKind::StorageFull);
    if !full {
        return error.to_string();
    }
    let progress = context.progress().to_wire();
    let free = free_bytes(context.records.store().dir()).unwrap_or(0);
    format!(
        "the disk is full ({error}): {} bytes of records are missing, {free} bytes are free; free some space, the node goes on by itself",
        progress.wanted_bytes.saturating_sub(progress.held_bytes)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_needed_for_the_records_and_a_little_more() {
        let missing = 1000 << 20;
        let needed = missing + missing / 100 + SPARE_BYTES;
        assert_eq!(enough_room(missing, needed), Ok(()));
        let room = room_for_records(needed);
        assert!(room <= missing && room > missing - 200, "{room}");
        assert_eq!(enough_room(room, needed), Ok(()));
        assert_eq!(room_for_records(SPARE_BYTES), 0);
        let refused = enough_room(missing, needed - 1).unwrap_err();
        for part in [needed.to_string(), (needed - 1).to_string(), "free some space".to_owned()] {
            assert!(refused.contains(&part), "{refused}");
        }
        assert!(enough_room(u64::MAX, u64::MAX - 1).is_err());
    }
}
