//! The model's elementary functions (rule N4), the same operations in scalar and SIMD code.
//!
//! Nothing here calls the platform's libm: `exp`, logarithm, sine and cosine are our own argument
//! reductions and polynomials, built from additions, multiplications, divisions, square roots and
//! (in f32) fused multiply-adds, all of which IEEE 754 rounds the same way on every machine.
//!
//! Bodies that [`crate::kernels`] instantiates once per instruction set are `*_body` functions:
//! the same Rust operations compiled with other target features give the same bits, only faster.
//! The public functions of this module run the fastest instance.

mod exp;
mod norm;
mod reduce;
mod rope;
mod select;
mod weights;

pub use exp::{exp, exp_f64, sigmoid, silu};
pub(crate) use exp::{ln_f64, sigmoid_body, silu_mul_body};
pub use norm::{layer_norm, rms_norm, softmax};
pub(crate) use norm::{layer_norm_body, rms_norm_body, softmax_body};
pub(crate) use reduce::{LANES, PlainStripes, Stripes, dot_body, load_lanes, tree16};
pub use rope::{Rope, RopeAngles};
pub use select::{argmax, largest, top_k};
pub use weights::{MASS_STEPS, Masses};
pub(crate) use weights::{approximate_weights_body, weights_body};
