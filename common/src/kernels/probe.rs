//! What the hardware can do at most: streaming reads, int8 and f32 multiply-adds.
//!
//! The figures are what benches divide by, so every loop does nothing but the thing measured: reads are
//! combined into registers by one cheap operation per register, multiply-adds run on registers only, in
//! enough independent chains to hide their latency. Results depend on every step and are returned, so that
//! the compiler can drop none.

use std::hint::black_box;

use super::Isa;

/// The measuring loops of one instruction set.
#[derive(Clone, Copy, Debug)]
pub struct Probe {
    isa: Isa,
}

/// Multiply-adds done, and a number that depends on all of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Macs {
    /// Multiply-adds.
    pub count: u64,
    /// Only there to be used.
    pub checksum: u64,
}

impl Probe {
    /// The loops of `isa`, `None` where this CPU lacks it.
    pub fn new(isa: Isa) -> Option<Self> {
        isa.ops().map(|_| Self { isa })
    }

    /// The instruction set.
    pub fn isa(self) -> Isa {
        self.isa
    }

    /// Reads every byte of `bytes` once, front to back, and returns the exclusive or of its 64-bit words
    /// (a last part of less than 8 bytes counts as a word with zeros).
    pub fn read(self, bytes: &[u8]) -> u64 {
        let whole = bytes.len() / READ_BLOCK * READ_BLOCK;
        let (blocks, rest) = bytes.split_at(whole);
        let sum = match self.isa {
            Isa::Portable => xor_words(blocks),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `new` saw that the CPU has AVX2.
            Isa::Avx2 => unsafe { x86::read_avx2(blocks) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `new` saw that the CPU has AVX-512.
            Isa::Avx512 => unsafe { x86::read_avx512(blocks) },
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 => xor_words(blocks),
        };
        sum ^ xor_words(rest)
    }

    /// `rounds` rounds of int8 dot-product steps, as many per round as the instruction set likes.
    pub fn int8(self, rounds: u64) -> Macs {
        match self.isa {
            Isa::Portable => portable_int8(rounds),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `new` saw that the CPU has AVX2.
            Isa::Avx2 => unsafe { x86::int8_avx2(rounds) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `new` saw that the CPU has AVX-512 with VNNI.
            Isa::Avx512 => unsafe { x86::int8_avx512(rounds) },
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 => portable_int8(rounds),
        }
    }

    /// `rounds` rounds of fused f32 multiply-adds.
    pub fn f32(self, rounds: u64) -> Macs {
        match self.isa {
            Isa::Portable => portable_f32(rounds),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `new` saw that the CPU has AVX2 and FMA.
            Isa::Avx2 => unsafe { x86::f32_avx2(rounds) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `new` saw that the CPU has AVX-512.
            Isa::Avx512 => unsafe { x86::f32_avx512(rounds) },
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 => portable_f32(rounds),
        }
    }
}

/// Bytes per step of the reading loops.
const READ_BLOCK: usize = 512;

/// Independent chains of multiply-adds; the longest latency is about five instructions of two units.
const CHAINS: usize = 12;

fn xor_words(bytes: &[u8]) -> u64 {
    let word = |chunk: &[u8]| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    };
    let mut chunks = bytes.chunks_exact(8);
    let sum = chunks.by_ref().fold(0, |sum, chunk| sum ^ word(chunk));
    sum ^ word(chunks.remainder())
}

/// Values of the portable loops; they stay in the first cache.
const PORTABLE_LEN: usize = 1024;

fn portable_int8(rounds: u64) -> Macs {
    let (a, b) = ([3i8; PORTABLE_LEN], [5i8; PORTABLE_LEN]);
    let mut sum = 0i32;
    for _ in 0..rounds {
        let (a, b) = (black_box(&a), black_box(&b));
        let dot: i32 = a.iter().zip(b).map(|(&a, &b)| i32::from(a) * i32::from(b)).sum();
        sum = sum.wrapping_add(dot);
    }
    Macs { count: rounds * PORTABLE_LEN as u64, checksum: sum as u64 }
}

fn portable_f32(rounds: u64) -> Macs {
    let a = [0.5f32; PORTABLE_LEN];
    let mut sums = [0f32; 32];
    for _ in 0..rounds {
        for chunk in black_box(&a).chunks_exact(32) {
            for (sum, a) in sums.iter_mut().zip(chunk) {
                *sum = *sum * 0.25 + a;
            }
        }
    }
    Macs { count: rounds * PORTABLE_LEN as u64, checksum: u64::from(sums.iter().sum::<f32>().to_bits()) }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    use super::{CHAINS, Macs, READ_BLOCK};

    /// # Safety
    /// The CPU must have AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn read_avx2(bytes: &[u8]) -> u64 {
        let mut sums = [_mm256_setzero_si256(); 8];
        for block in bytes.chunks_exact(READ_BLOCK) {
            for (i, chunk) in block.chunks_exact(32).enumerate() {
                // SAFETY: `chunk` has 32 bytes; the load is unaligned.
                let value = unsafe { _mm256_loadu_si256(chunk.as_ptr().cast()) };
                sums[i % 8] = _mm256_xor_si256(sums[i % 8], value);
            }
        }
        let sum = sums.into_iter().fold(_mm256_setzero_si256(), |a, b| _mm256_xor_si256(a, b));
        let mut words = [0u64; 4];
        // SAFETY: `words` has 32 bytes; the store is unaligned.
        unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast(), sum) };
        words.into_iter().fold(0, |a, b| a ^ b)
    }

    /// # Safety
    /// The CPU must have AVX-512 F.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn read_avx512(bytes: &[u8]) -> u64 {
        let mut sums = [_mm512_setzero_si512(); 8];
        for block in bytes.chunks_exact(READ_BLOCK) {
            for (sum, chunk) in sums.iter_mut().zip(block.chunks_exact(64)) {
                // SAFETY: `chunk` has 64 bytes; the load is unaligned.
                let value = unsafe { _mm512_loadu_si512(chunk.as_ptr().cast()) };
                *sum = _mm512_xor_si512(*sum, value);
            }
        }
        let sum = sums.into_iter().fold(_mm512_setzero_si512(), |a, b| _mm512_xor_si512(a, b));
        let mut words = [0u64; 8];
        // SAFETY: `words` has 64 bytes; the store is unaligned.
        unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), sum) };
        words.into_iter().fold(0, |a, b| a ^ b)
    }

    /// Steps per round, so that the loop itself costs nothing.
    const STEPS: usize = 64;

    /// `vpdpbusd`: 64 multiply-adds per instruction.
    ///
    /// # Safety
    /// The CPU must have AVX-512 F and VNNI.
    #[target_feature(enable = "avx512f,avx512vnni")]
    pub(super) unsafe fn int8_avx512(rounds: u64) -> Macs {
        let a = _mm512_set1_epi8(black_box(3));
        let b = _mm512_set1_epi8(black_box(1));
        let mut sums = [_mm512_setzero_si512(); CHAINS];
        for _ in 0..rounds {
            for _ in 0..STEPS {
                for sum in &mut sums {
                    *sum = _mm512_dpbusd_epi32(*sum, a, b);
                }
            }
        }
        let sum = sums.into_iter().fold(_mm512_setzero_si512(), |a, b| _mm512_add_epi32(a, b));
        Macs { count: rounds * (STEPS * CHAINS * 64) as u64, checksum: _mm512_reduce_add_epi32(sum) as u64 }
    }

    /// `vpmaddubsw`, `vpmaddwd`, `vpaddd`: 32 multiply-adds per three instructions. One operand is read
    /// from the first cache, as constant operands would be multiplied once for all.
    ///
    /// # Safety
    /// The CPU must have AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn int8_avx2(rounds: u64) -> Macs {
        let a = _mm256_set1_epi8(black_box(3));
        let ones = _mm256_set1_epi16(1);
        let values = [1i8; 32 * CHAINS];
        let mut sums = [_mm256_setzero_si256(); CHAINS];
        for _ in 0..rounds {
            for _ in 0..STEPS {
                let values = black_box(&values);
                for (sum, value) in sums.iter_mut().zip(values.chunks_exact(32)) {
                    // SAFETY: `value` has 32 bytes; the load is unaligned.
                    let b = unsafe { _mm256_loadu_si256(value.as_ptr().cast()) };
                    let pairs = _mm256_maddubs_epi16(a, b);
                    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, ones));
                }
            }
        }
        let sum = sums.into_iter().fold(_mm256_setzero_si256(), |a, b| _mm256_add_epi32(a, b));
        let mut words = [0u32; 8];
        // SAFETY: `words` has 32 bytes; the store is unaligned.
        unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast(), sum) };
        let checksum = words.into_iter().map(u64::from).fold(0, u64::wrapping_add);
        Macs { count: rounds * (STEPS * CHAINS * 32) as u64, checksum }
    }

    /// # Safety
    /// The CPU must have AVX-512 F.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn f32_avx512(rounds: u64) -> Macs {
        let (a, b) = (_mm512_set1_ps(black_box(0.25)), _mm512_set1_ps(black_box(0.5)));
        let mut sums = [_mm512_setzero_ps(); CHAINS];
        for _ in 0..rounds {
            for _ in 0..STEPS {
                for sum in &mut sums {
                    *sum = _mm512_fmadd_ps(*sum, a, b);
                }
            }
        }
        let sum = sums.into_iter().fold(_mm512_setzero_ps(), |a, b| _mm512_add_ps(a, b));
        let checksum = u64::from(_mm512_reduce_add_ps(sum).to_bits());
        Macs { count: rounds * (STEPS * CHAINS * 16) as u64, checksum }
    }

    /// # Safety
    /// The CPU must have AVX2 and FMA.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn f32_avx2(rounds: u64) -> Macs {
        let (a, b) = (_mm256_set1_ps(black_box(0.25)), _mm256_set1_ps(black_box(0.5)));
        let mut sums = [_mm256_setzero_ps(); CHAINS];
        for _ in 0..rounds {
            for _ in 0..STEPS {
                for sum in &mut sums {
                    *sum = _mm256_fmadd_ps(*sum, a, b);
                }
            }
        }
        let sum = sums.into_iter().fold(_mm256_setzero_ps(), |a, b| _mm256_add_ps(a, b));
        let mut lanes = [0f32; 8];
        // SAFETY: `lanes` has 32 bytes; the store is unaligned.
        unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), sum) };
        let checksum = u64::from(lanes.iter().sum::<f32>().to_bits());
        Macs { count: rounds * (STEPS * CHAINS * 8) as u64, checksum }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probes() -> impl Iterator<Item = Probe> {
        Isa::available().into_iter().filter_map(Probe::new)
    }

    #[test]
    fn every_byte_is_read_once() {
        let mut bytes: Vec<u8> = (0..5003u32).map(|i| (i * i % 251) as u8).collect();
        for probe in probes() {
            let sum = probe.read(&bytes);
            assert_eq!(sum, xor_words(&bytes), "{}", probe.isa());
            for at in [0, 511, 512, 4607, 4608, 5002] {
                bytes[at] ^= 0x40;
                assert_ne!(probe.read(&bytes), sum, "{}: byte {at} is not read", probe.isa());
                bytes[at] ^= 0x40;
            }
            assert_eq!(probe.read(&[]), 0);
        }
    }

    #[test]
    fn every_multiply_add_is_counted() {
        for probe in probes() {
            for (rounds, factor) in [(1, 1), (3, 3)] {
                assert_eq!(probe.int8(rounds).count, factor * probe.int8(1).count);
                assert_eq!(probe.f32(rounds).count, factor * probe.f32(1).count);
            }
            // 3 · 1 (or 3 · 5 portably) per multiply-add.
            let product = if probe.isa() == Isa::Portable { 15 } else { 3 };
            let macs = probe.int8(5);
            assert_eq!(macs.checksum, macs.count * product, "{}", probe.isa());
        }
    }
}
