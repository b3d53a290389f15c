//! Telling the storage formats apart by byte counts (docs/formats.md §4.3 and §4.4).
//!
//! There is no format code on disk: shape (from the configuration), payload bytes and scale bytes decide.
//! What does not fit exactly is refused, never guessed.

use crate::quant::Format;

/// Group sizes the converter can write, in the order colibrì tries them.
const GROUP_SIZES: [u32; 8] = [16, 32, 48, 64, 96, 128, 192, 256];

/// Everything that decides the format of one quantised matrix.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Evidence<'a> {
    /// Output rows, from the configuration.
    pub rows: usize,
    /// Input columns, from the configuration.
    pub cols: usize,
    /// Bytes of the payload.
    pub weight_bytes: u64,
    /// Bytes of the scales.
    pub scale_bytes: u64,
    /// Registry name from the `colibri.fmt` stamp, if the file carries one.
    pub stamp: Option<&'a str>,
    /// Group size recorded by the converter: only a hint.
    pub group_hint: Option<u32>,
    /// Group size all unambiguous matrices of the model agree on.
    pub agreed_group: Option<u32>,
}

/// What the evidence says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Exactly one format fits.
    Is(Format),
    /// Grouped int4 whose group size cannot be told.
    Ambiguous(Vec<u32>),
}

/// Resolves the format of one matrix.
///
/// # Errors
/// One sentence: the format that is not supported, or the counts that fit no format.
pub(crate) fn resolve(e: &Evidence<'_>) -> Result<Verdict, String> {
    if let Some(name @ ("e8-iq3-lattice" | "int4-rans256-g0")) = e.stamp {
        return Err(unsupported(name));
    }
    let verdict = by_counts(e)?;
    match (e.stamp, &verdict) {
        (Some(stamp), Verdict::Is(format)) if !stamp_fits(stamp, *format) => {
            Err(format!("it is stamped {stamp}, but its sizes say {}: {}", registry_name(*format), counts(e)))
        }
        (Some(stamp), Verdict::Ambiguous(_)) if !stamp.starts_with("int4-g") => {
            Err(format!("it is stamped {stamp}, but its sizes say int4-grouped: {}", counts(e)))
        }
        _ => Ok(verdict),
    }
}

/// The order of docs/formats.md §4.3.
fn by_counts(e: &Evidence<'_>) -> Result<Verdict, String> {
    let (rows, cols) = (e.rows as u64, e.cols as u64);
    let weights = |per_row: u64| rows.checked_mul(per_row) == Some(e.weight_bytes);
    let scales = |count: u64| count.checked_mul(4) == Some(e.scale_bytes);
    let per_row = scales(rows);
    let blocks = rows.div_ceil(128).saturating_mul(cols.div_ceil(128));

    if e.scale_bytes == 4 && weights(cols.div_ceil(256).saturating_mul(98)) {
        return Err(unsupported("e8-iq3-lattice"));
    }
    if weights(cols) {
        let fp8 = scales(blocks);
        if per_row && !(fp8 && e.stamp == Some("fp8-e4m3-b128")) {
            return Ok(Verdict::Is(Format::Int8Row));
        }
        if fp8 {
            return Ok(Verdict::Is(Format::Fp8Block));
        }
        if e.scale_bytes == blocks {
            return Err(unsupported("fp8 with E8M0 block scales"));
        }
    }
    if weights(cols.div_ceil(2)) {
        if per_row {
            return Ok(Verdict::Is(Format::Int4Row));
        }
        if let Some(verdict) = group_size(e) {
            return Ok(verdict);
        }
    }
    if weights(cols.div_ceil(4)) && per_row {
        return Ok(Verdict::Is(Format::Int2Row));
    }
    if weights(cols.div_ceil(64).saturating_mul(24)) && scales(rows.saturating_mul(cols.div_ceil(64))) {
        return Ok(Verdict::Is(Format::Int3G64));
    }
    let entropy_coded = per_row && e.weight_bytes < rows.saturating_mul(cols.div_ceil(2));
    let guess =
        if entropy_coded { " (an entropy-coded int4-rans256-g0 payload is not supported)" } else { "" };
    Err(format!("its sizes fit no storage format{guess}: {}", counts(e)))
}

/// Group size of a grouped int4 matrix; `None` when no candidate fits the number of scales.
fn group_size(e: &Evidence<'_>) -> Option<Verdict> {
    let fits = |&group: &u32| {
        let groups = (e.cols as u64).div_ceil(u64::from(group));
        e.cols >= group as usize && (e.rows as u64).checked_mul(groups * 4) == Some(e.scale_bytes)
    };
    let candidates: Vec<u32> = GROUP_SIZES.into_iter().filter(fits).collect();
    let stamped = e.stamp.and_then(|s| s.strip_prefix("int4-g")).and_then(|g| g.parse().ok());
    let divides = |group: &u32| e.cols.is_multiple_of(*group as usize);
    let among = |group: &u32| candidates.contains(group);
    // Two candidates that both divide the width give different numbers of scales, so at most one does.
    let chosen = match candidates[..] {
        [] => return None,
        [only] => Some(only),
        _ => stamped
            .filter(among)
            .or(e.group_hint.filter(among))
            .or_else(|| candidates.iter().copied().find(divides))
            .or(e.agreed_group.filter(among)),
    };
    Some(match chosen {
        Some(group) => Verdict::Is(Format::Int4Grouped { group }),
        None => Verdict::Ambiguous(candidates),
    })
}

fn unsupported(name: &str) -> String {
    format!(
        "it is stored as {name}, which is not supported; convert the model to int4, int8 or fp8-e4m3-b128"
    )
}

fn counts(e: &Evidence<'_>) -> String {
    format!("[{}, {}] with {} bytes and {} bytes of scales", e.rows, e.cols, e.weight_bytes, e.scale_bytes)
}

/// The name colibrì's stamp uses.
fn registry_name(format: Format) -> &'static str {
    match format {
        Format::Int8Row => "int8-row",
        Format::Int4Row => "int4-row",
        Format::Int2Row => "int2-row",
        Format::Int4Grouped { .. } => "int4-grouped",
        Format::Int3G64 => "int3-g64",
        Format::Fp8Block => "fp8-e4m3-b128",
        Format::F32 => "f32",
        Format::F16 => "f16",
        Format::Bf16 => "bf16",
    }
}

/// `int4-grouped` may also be spelt with its group size, `int4-g64`.
fn stamp_fits(stamp: &str, format: Format) -> bool {
    match format {
        Format::Int4Grouped { group } => {
            stamp == "int4-grouped" || stamp.strip_prefix("int4-g") == Some(group.to_string().as_str())
        }
        // One group per row is the same bytes as one scale per row.
        Format::Int4Row => stamp.starts_with("int4-"),
        _ => stamp == registry_name(format),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evidence<'a>(rows: usize, cols: usize, weight_bytes: u64, scale_bytes: u64) -> Evidence<'a> {
        Evidence { rows, cols, weight_bytes, scale_bytes, stamp: None, group_hint: None, agreed_group: None }
    }

    #[test]
    fn every_format_is_recognised_by_its_own_byte_counts() {
        for format in [
            Format::Int8Row,
            Format::Int4Row,
            Format::Int2Row,
            Format::Int3G64,
            Format::Fp8Block,
            Format::Int4Grouped { group: 16 },
            Format::Int4Grouped { group: 32 },
            Format::Int4Grouped { group: 64 },
            Format::Int4Grouped { group: 128 },
            Format::Int4Grouped { group: 192 },
        ] {
            for (rows, cols) in [(2048, 6144), (6144, 2048), (28672, 512), (576, 6144), (12288, 6144)] {
                if matches!(format, Format::Int4Grouped { group: 192 }) && cols % 192 != 0 {
                    continue;
                }
                let e = evidence(
                    rows,
                    cols,
                    format.weight_bytes(rows, cols) as u64,
                    4 * format.scale_count(rows, cols) as u64,
                );
                assert_eq!(resolve(&e), Ok(Verdict::Is(format)), "[{rows}, {cols}]");
            }
        }
    }

    #[test]
    fn the_tie_of_glm_o_proj_is_int8_unless_stamped() {
        let mut e = evidence(6144, 16384, 6144 * 16384, 4 * 6144);
        assert_eq!(resolve(&e), Ok(Verdict::Is(Format::Int8Row)));
        e.stamp = Some("fp8-e4m3-b128");
        assert_eq!(resolve(&e), Ok(Verdict::Is(Format::Fp8Block)));
        e.stamp = Some("int4-row");
        assert!(resolve(&e).unwrap_err().contains("stamped int4-row"));
    }

    #[test]
    fn an_ambiguous_group_size_takes_the_hint_then_the_divisor_then_the_agreement() {
        // [3, 131] in three groups: 48 and 64 both fit, neither divides 131.
        let mut e = evidence(3, 131, 198, 36);
        assert_eq!(resolve(&e), Ok(Verdict::Ambiguous(vec![48, 64])));
        e.agreed_group = Some(48);
        assert_eq!(resolve(&e), Ok(Verdict::Is(Format::Int4Grouped { group: 48 })));
        e.group_hint = Some(64);
        assert_eq!(resolve(&e), Ok(Verdict::Is(Format::Int4Grouped { group: 64 })));
        e.group_hint = Some(32);
        assert_eq!(
            resolve(&e),
            Ok(Verdict::Is(Format::Int4Grouped { group: 48 })),
            "a hint that cannot be is ignored"
        );
        // Two groups of 128 columns: 64 and 96 fit, 64 divides.
        let e = evidence(5, 128, 320, 40);
        assert_eq!(resolve(&e), Ok(Verdict::Is(Format::Int4Grouped { group: 64 })));
    }

    #[test]
    fn unsupported_formats_are_refused_by_name() {
        let lattice = evidence(2048, 6144, 2048 * 24 * 98, 4);
        assert!(resolve(&lattice).unwrap_err().contains("e8-iq3-lattice"));
        let e8m0 = evidence(2048, 6144, 2048 * 6144, 16 * 48);
        assert!(resolve(&e8m0).unwrap_err().contains("E8M0"));
        let mut rans = evidence(2048, 6144, 4_781_506, 8192);
        assert!(resolve(&rans).unwrap_err().contains("int4-rans256-g0"));
        rans.stamp = Some("int4-rans256-g0");
        assert!(resolve(&rans).unwrap_err().contains("not supported"));
    }

    #[test]
    fn counts_that_fit_nothing_are_named() {
        let message = resolve(&evidence(8, 64, 255, 32)).unwrap_err();
        assert!(message.contains("[8, 64] with 255 bytes and 32 bytes of scales"), "{message}");
        assert!(resolve(&evidence(usize::MAX, usize::MAX, 1, 1)).is_err(), "no overflow");
    }

    /// The recorded file with one tensor per format, odd widths and the ambiguous group size.
    #[test]
    fn the_sample_of_all_formats_decodes_to_the_recorded_digests() {
        use crate::container::safetensors::read_header_of;
        use crate::quant::MatrixRef;
        use sha2::{Digest, Sha256};

        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/colibri-container/");
        let path = std::path::PathBuf::from(format!("{dir}formats.safetensors.sample"));
        let json = std::fs::read(format!("{dir}expected.json")).unwrap();
        let expected: serde_json::Value = serde_json::from_slice(&json).unwrap();
        let header = read_header_of(&path).unwrap();
        assert_eq!(header.flaws, []);
        let file = std::fs::read(&path).unwrap();
        let bytes = |name: &str| {
            let (_, info) = header.tensors.iter().find(|(n, _)| &**n == name).unwrap();
            &file[info.begin as usize..info.end as usize]
        };
        let tensors = expected["formats_file"].as_object().unwrap();
        assert_eq!(tensors.len() * 2, header.tensors.len());
        for (name, tensor) in tensors {
            let side = |i: usize| tensor["shape"][i].as_u64().unwrap() as usize;
            let (rows, cols) = (side(0), side(1));
            let (weights, scales) = (bytes(name), bytes(&format!("{name}.qs")));
            let mut e = evidence(rows, cols, weights.len() as u64, scales.len() as u64);
            if name == "fmt.int4-g64-ambiguous.weight" {
                assert_eq!(resolve(&e), Ok(Verdict::Ambiguous(vec![48, 64])));
                e.group_hint = Some(64);
            }
            let Ok(Verdict::Is(format)) = resolve(&e) else { panic!("{name} is not told") };
            let scales: Vec<f32> = scales.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            let matrix = MatrixRef::new(format, rows, cols, weights, &scales).unwrap();
            let mut hash = Sha256::new();
            let mut row = vec![0f32; cols];
            for r in 0..rows {
                matrix.decode_row(r, &mut row);
                row.iter().for_each(|v| hash.update(v.to_le_bytes()));
            }
            let hex: String = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
            assert_eq!(hex, tensor["sha256_f32le"].as_str().unwrap(), "{name} as {format}");
        }
    }
}
