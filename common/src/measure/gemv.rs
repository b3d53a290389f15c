//! Weights multiplied with one row.

use std::time::{Duration, Instant};

use super::disk::MeasureError;
use crate::experts::MatrixSpec;
use crate::kernels::{Activations, Kernels};
use crate::mem::AlignedBuf;
use crate::quant::MatrixRef;
use crate::synth::{fill_matrix, random_values};

/// Weights to go through: larger than the last-level cache of desktop CPUs.
const BYTES: usize = 64 << 20;
/// Weights start on cache lines.
const ALIGN_BYTES: usize = 64;

/// Bytes of weights and scales per second that the current rayon pool multiplies with one row, for matrices of
/// the form `spec` that come from memory. Takes about `budget`, and the time to fill some memory once.
///
/// # Errors
/// [`MeasureError::Io`] without memory.
pub fn gemv_bytes_per_s(kernels: Kernels, spec: &MatrixSpec, budget: Duration) -> Result<f64, MeasureError> {
    let weight_room = spec.weight_bytes().next_multiple_of(ALIGN_BYTES);
    let stride = weight_room + spec.scale_bytes().next_multiple_of(ALIGN_BYTES);
    let count = BYTES.div_ceil(stride.max(1)).max(1);
    let no_memory = |source| MeasureError::Io { action: format!("allocate {BYTES} bytes"), source };
    let mut buffer = AlignedBuf::zeroed(count * stride).map_err(no_memory)?;
    let (first, others) = buffer.split_at_mut(stride);
    let (weights, scales) = first.split_at_mut(weight_room);
    let scales = bytemuck::cast_slice_mut(&mut scales[..spec.scale_bytes()]);
    fill_matrix(spec, 1, &mut weights[..spec.weight_bytes()], scales);
    others.chunks_exact_mut(stride).for_each(|other| other.copy_from_slice(first));
    let x = Activations::from_f32(random_values(spec.cols, 1), spec.cols);
    let x = if spec.format.is_integer() { x.quantized() } else { x };
    let mut out = vec![0.0; spec.rows];
    let started = Instant::now();
    let mut matrices = 0;
    while matrices == 0 || started.elapsed() < budget {
        for slot in buffer.chunks_exact(stride) {
            let (weights, scales) = slot.split_at(weight_room);
            let scales = bytemuck::cast_slice(&scales[..spec.scale_bytes()]);
            let matrix =
                MatrixRef::new(spec.format, spec.rows, spec.cols, &weights[..spec.weight_bytes()], scales);
            // Shapes and forms were made to fit above.
            if let Some(matrix) = matrix {
                let _ = kernels.matmul(matrix, &x, &mut out);
            }
            std::hint::black_box(&mut out);
            matrices += 1;
        }
    }
    Ok((matrices * spec.bytes()) as f64 / started.elapsed().as_secs_f64().max(1e-9))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::Format;

    #[test]
    fn every_format_can_be_measured() {
        for format in [Format::Int4Grouped { group: 64 }, Format::Int8Row, Format::Bf16] {
            let spec = MatrixSpec { format, rows: 128, cols: 512 };
            let rate = gemv_bytes_per_s(Kernels::best(), &spec, Duration::from_millis(1)).unwrap();
            assert!(rate.is_finite() && rate > 1e6, "{format}: {rate}");
        }
    }
}
