//! Philox4x32-10, the counter-based generator of rule N8.
//!
//! Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); tested against
//! the known answers published with its reference implementation.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Four random words of `counter` under `key`.
pub fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..ROUNDS {
        if round > 0 {
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        let (high0, low0) = wide_product(MULTIPLIERS[0], counter[0]);
        let (high1, low1) = wide_product(MULTIPLIERS[1], counter[2]);
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0];
    }
    counter
}

fn wide_product(a: u32, b: u32) -> (u32, u32) {
    let product = u64::from(a) * u64::from(b);
    ((product >> 32) as u32, product as u32)
}

/// The uniform number in `[0, 1)`, a multiple of 2⁻⁵³, that belongs to a seed and a position.
pub fn uniform(seed: u64, position: u64) -> f64 {
    let halves = |x: u64| [x as u32, (x >> 32) as u32];
    let [low, high] = halves(position);
    let words = philox4x32([low, high, 0, 0], halves(seed));
    let bits = u64::from(words[0]) << 32 | u64::from(words[1]);
    (bits >> 11) as f64 * (1.0 / (1_u64 << 53) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_known_answers() {
        for (counter, key, answer) in [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ] {
            assert_eq!(philox4x32(counter, key), answer);
        }
    }

    #[test]
    fn uniform_numbers_fill_the_unit_interval() {
        let draws: Vec<f64> = (0..4096).map(|position| uniform(7, position)).collect();
        assert!(draws.iter().all(|u| (0.0..1.0).contains(u)));
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        // Six standard deviations of the mean of 4096 uniform numbers.
        assert!((mean - 0.5).abs() < 0.027, "{mean}");
        assert_ne!(uniform(7, 1), uniform(8, 1));
        assert_ne!(uniform(7, 1), uniform(7, 1 << 32));
        assert_ne!(uniform(7, 1), uniform(7 | 1 << 40, 1));
    }
}
