//! Replays routing traces against cache policies, without a disk or a model.
//!
//! The replay follows the store: the hits of a step are taken before its misses, an expert of the step never
//! makes room for another while something else can, and every miss is given a slot, because what is computed
//! must be in memory. An access is one expert in one step, however many rows chose it. A session ends the
//! process: caches are empty, counts are kept only by policies that save them. A trace is held in memory as
//! four bytes per access.

mod baselines;
mod bounds;
mod replay;
mod s3fifo;
mod tinylfu;

pub use baselines::{AgedFrequency, Arc, Fifo, Lru};
pub use bounds::{Belady, fixed_choice};
pub use replay::{Budget, Phase, PhaseKind, Replay, Step};
pub use s3fifo::S3Fifo;
pub use tinylfu::TinyLfu;

use std::sync::PoisonError;

use super::super::ExpertId;
use super::super::store::{EvictionPolicy, LearnedFrequency, SharedUsage};
use super::{HORIZONS, Usage, UsageOptions, pins};

/// Which policy to replay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PolicyKind {
    /// Least recently used.
    Lru,
    /// First in, first out.
    Fifo,
    /// Frequency with dynamic ageing (LFU-DA; Arlitt et al., 2000).
    Aged,
    /// ARC (Megiddo and Modha, FAST 2003).
    Arc,
    /// S3-FIFO (Yang et al., SOSP 2023).
    S3Fifo,
    /// W-TinyLFU (Einziger, Friedman and Manes, 2017), with exact counts for the sketch.
    TinyLfu,
    /// Decayed frequency of all experts over one half-life in tokens.
    Decayed(f64),
    /// The store's policy: decayed frequency over several horizons, counts kept from session to session, hottest experts loaded at start.
    Learned(UsageOptions),
    /// The same with a share of the room pinned at the start of each session.
    Pinned(UsageOptions, f64),
    /// Farthest next use (Belady 1966): no policy without foreknowledge does better.
    Belady,
    /// The experts most used in each phase, chosen with hindsight over all layers.
    Fixed,
    /// The same with an equal room for every layer.
    FixedPerLayer,
}

impl PolicyKind {
    /// What `simulate` compares when nobody chooses.
    pub fn all() -> Vec<Self> {
        let learned = UsageOptions::default();
        vec![
            Self::Lru,
            Self::Fifo,
            Self::Aged,
            Self::Arc,
            Self::S3Fifo,
            Self::TinyLfu,
            Self::Decayed(16.0),
            Self::Decayed(64.0),
            Self::Decayed(250.0),
            Self::Decayed(1000.0),
            Self::Decayed(4000.0),
            Self::Decayed(f64::INFINITY),
            Self::Learned(learned),
            Self::Pinned(learned, 0.5),
            Self::Fixed,
            Self::FixedPerLayer,
            Self::Belady,
        ]
    }
}

impl PolicyKind {
    /// The policy for a store of about this many experts; `None` for those that need a saved usage or the
    /// future.
    pub fn policy(self, slots: usize) -> Option<Box<dyn EvictionPolicy>> {
        Some(match self {
            Self::Lru => Box::new(Lru::default()),
            Self::Fifo => Box::new(Fifo::default()),
            Self::Aged => Box::new(AgedFrequency::default()),
            Self::Arc => Box::new(Arc::new(slots)),
            Self::S3Fifo => Box::new(S3Fifo::new(slots)),
            Self::TinyLfu => Box::new(TinyLfu::new(slots)),
            Self::Decayed(half_life) => {
                let usage = Usage::new(UsageOptions::single(half_life));
                Box::new(LearnedFrequency::over(SharedUsage::new(usage.into()), true))
            }
            _ => return None,
        })
    }
}

impl std::fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let options = |f: &mut std::fmt::Formatter<'_>, o: &UsageOptions| {
            if *o == UsageOptions::default() {
                return Ok(());
            }
            let mut before = ':';
            for (half_life, weight) in o.half_lives.iter().zip(o.weights) {
                write!(f, "{before}{half_life}x{weight}")?;
                before = ',';
            }
            Ok(())
        };
        match self {
            Self::Lru => f.write_str("lru"),
            Self::Fifo => f.write_str("fifo"),
            Self::Aged => f.write_str("lfu-da"),
            Self::Arc => f.write_str("arc"),
            Self::S3Fifo => f.write_str("s3-fifo"),
            Self::TinyLfu => f.write_str("w-tinylfu"),
            Self::Decayed(half_life) if half_life.is_infinite() => f.write_str("lfu"),
            Self::Decayed(half_life) => write!(f, "decayed:{half_life}"),
            Self::Learned(o) => f.write_str("learned").and_then(|()| options(f, o)),
            Self::Pinned(o, share) => write!(f, "pinned@{share}").and_then(|()| options(f, o)),
            Self::Belady => f.write_str("belady"),
            Self::Fixed => f.write_str("fixed"),
            Self::FixedPerLayer => f.write_str("fixed-per-layer"),
        }
    }
}

impl std::str::FromStr for PolicyKind {
    type Err = String;

    /// A name as displayed; `learned:HALFLIFExWEIGHT,…`, `pinned@SHARE[:HALFLIFExWEIGHT,…]`, `decayed:TOKENS`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, numbers) = text.split_once(':').unwrap_or((text, ""));
        let bad = || format!("{text:?} is no policy; see `shimmer usage simulate --help`");
        if name == "decayed" {
            let half_life = numbers.parse().ok().filter(|&tokens: &f64| tokens >= 1.0).ok_or_else(bad)?;
            return Ok(Self::Decayed(half_life));
        }
        let options = parse_options(numbers).ok_or_else(bad)?;
        if let Some(share) = name.strip_prefix("pinned@") {
            let share = share.parse().ok().filter(|share| (0.0..=1.0).contains(share)).ok_or_else(bad)?;
            return Ok(Self::Pinned(options, share));
        }
        Ok(match name {
            "learned" => Self::Learned(options),
            _ if !numbers.is_empty() => return Err(bad()),
            "lru" => Self::Lru,
            "fifo" => Self::Fifo,
            "lfu-da" => Self::Aged,
            "arc" => Self::Arc,
            "s3-fifo" => Self::S3Fifo,
            "w-tinylfu" => Self::TinyLfu,
            "lfu" => Self::Decayed(f64::INFINITY),
            "belady" => Self::Belady,
            "fixed" => Self::Fixed,
            "fixed-per-layer" => Self::FixedPerLayer,
            _ => return Err(bad()),
        })
    }
}

fn parse_options(text: &str) -> Option<UsageOptions> {
    let mut options = UsageOptions::default();
    if text.is_empty() {
        return Some(options);
    }
    let horizons: Vec<&str> = text.split(',').collect();
    if horizons.len() != HORIZONS {
        return None;
    }
    let slots = options.half_lives.iter_mut().zip(&mut options.weights);
    for ((half_life, weight), horizon) in slots.zip(horizons) {
        let (a, b) = horizon.split_once('x')?;
        (*half_life, *weight) = (a.parse().ok()?, b.parse().ok()?);
        if !(*half_life >= 1.0 && (0.0..=1.0).contains(weight)) {
            return None;
        }
    }
    Some(options)
}

/// Accesses and hits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Experts needed, each once per step.
    pub uses: u64,
    /// Found resident.
    pub hits: u64,
}

impl Tally {
    /// Hits per use; 0 without uses.
    pub fn rate(&self) -> f64 {
        if self.uses == 0 { 0.0 } else { self.hits as f64 / self.uses as f64 }
    }

    fn add(&mut self, hits: u64, uses: u64) {
        self.hits += hits;
        self.uses += uses;
    }
}

/// What one phase of a trace came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PhaseResult {
    /// Steps of few rows.
    pub decode: Tally,
    /// Steps of many rows.
    pub prefill: Tally,
    /// Decode steps by windows of tokens.
    pub windows: Vec<Tally>,
}

/// Replays `replay` with room for `budget`, one result per phase.
pub fn simulate(replay: &Replay, kind: PolicyKind, budget: Budget) -> Vec<PhaseResult> {
    let room = budget.bytes(replay);
    match kind {
        PolicyKind::Fixed | PolicyKind::FixedPerLayer => {
            let per_layer = kind == PolicyKind::FixedPerLayer;
            let run = |phase| tally_fixed(replay, phase, &fixed_choice(replay, phase, room, per_layer));
            return replay.phases.iter().map(run).collect();
        }
        _ => {}
    }
    let learning = match kind {
        PolicyKind::Learned(options) | PolicyKind::Pinned(options, _) => {
            Some(SharedUsage::new(Usage::new(options).into()))
        }
        _ => None,
    };
    let pin_share = if let PolicyKind::Pinned(_, share) = kind { share } else { 0.0 };
    let mut cache = None;
    let mut results = Vec::new();
    for phase in &replay.phases {
        if cache.is_none() || phase.kind == PhaseKind::Session {
            let policy: Box<dyn EvictionPolicy> = match (&learning, kind) {
                (Some(usage), _) => Box::new(LearnedFrequency::over(usage.clone(), true)),
                (None, PolicyKind::Belady) => Box::new(Belady::new(replay, phase.steps.start)),
                (None, kind) => kind.policy(replay.slots(room)).unwrap_or_else(|| Box::new(Lru::default())),
            };
            let mut fresh = Cache::new(replay, policy, room);
            if let Some(usage) = &learning {
                fresh.preload(usage, pin_share);
                fresh.pinning = (pin_share > 0.0).then(|| usage.clone());
            }
            cache = Some(fresh);
        }
        if let Some(cache) = &mut cache {
            results.push(cache.run(phase));
        }
    }
    results
}

/// Hits of a choice that never changes.
fn tally_fixed(replay: &Replay, phase: &Phase, chosen: &[bool]) -> PhaseResult {
    let mut result = PhaseResult::default();
    for step in replay.steps(phase) {
        let hits = step.experts.iter().filter(|&&e| chosen.get(e as usize) == Some(&true)).count();
        count(replay, &mut result, &step, hits as u64);
    }
    result
}

fn count(replay: &Replay, result: &mut PhaseResult, step: &Step<'_>, hits: u64) {
    let uses = step.experts.len() as u64;
    if !replay.is_decode(step) {
        result.prefill.add(hits, uses);
        return;
    }
    result.decode.add(hits, uses);
    let window = (step.token / replay.window_tokens.max(1)) as usize;
    if result.windows.len() <= window {
        result.windows.resize(window + 1, Tally::default());
    }
    if let Some(tally) = result.windows.get_mut(window) {
        tally.add(hits, uses);
    }
}

/// The store's course of a step, in terms of residency alone.
struct Cache<'a> {
    replay: &'a Replay,
    policy: Box<dyn EvictionPolicy>,
    room: u64,
    used: u64,
    resident: Vec<bool>,
    pinned: Vec<bool>,
    /// The step that needs the expert, counted from one.
    needed: Vec<u64>,
    step: u64,
    uses: Vec<(u16, usize)>,
    /// What pins are chosen by; `None` without pins.
    pinning: Option<SharedUsage>,
    pin_room: u64,
    pins: Vec<ExpertId>,
}

impl<'a> Cache<'a> {
    fn new(replay: &'a Replay, policy: Box<dyn EvictionPolicy>, room: u64) -> Self {
        let n = replay.experts();
        let (resident, pinned, needed) = (vec![false; n], vec![false; n], vec![0; n]);
        Self {
            replay,
            policy,
            room,
            used: 0,
            resident,
            pinned,
            needed,
            step: 0,
            uses: Vec::new(),
            pinning: None,
            pin_room: 0,
            pins: Vec::new(),
        }
    }

    /// Loads the hottest experts known, at once; the first of them, up to `pin_share` of the room, are pinned.
    fn preload(&mut self, usage: &SharedUsage, pin_share: f64) {
        self.pin_room = (pin_share * self.room as f64) as u64;
        let bytes = |id| self.replay.dense(id).map(|expert| self.replay.bytes(expert));
        let (hot, pinned) = {
            let usage = usage.lock().unwrap_or_else(PoisonError::into_inner);
            (pins::hottest(&usage, self.room, bytes), pins::hottest(&usage, self.pin_room, bytes))
        };
        for id in hot {
            let Some(expert) = self.replay.dense(id) else { continue };
            self.used += self.replay.bytes(expert);
            mark(&mut self.resident, expert, true);
            self.policy.inserted(id);
        }
        self.set_pins(pinned);
    }

    fn set_pins(&mut self, pins: Vec<ExpertId>) {
        self.pinned.fill(false);
        for expert in pins.iter().filter_map(|&id| self.replay.dense(id)) {
            mark(&mut self.pinned, expert, true);
        }
        self.pins = pins;
    }

    /// Exchanges pins as the running program does; the newly pinned are loaded at once.
    fn repin(&mut self, usage: &SharedUsage) {
        let bytes = |id| self.replay.dense(id).map(|expert| self.replay.bytes(expert));
        let exchanged = {
            let usage = usage.lock().unwrap_or_else(PoisonError::into_inner);
            pins::exchange(&usage, self.pin_room, &self.pins, bytes)
        };
        let Some(exchanged) = exchanged else { return };
        self.set_pins(exchanged.clone());
        for expert in exchanged.into_iter().filter_map(|id| self.replay.dense(id)) {
            if self.resident.get(expert as usize) == Some(&false) {
                self.load(expert);
            }
        }
    }

    fn run(&mut self, phase: &Phase) -> PhaseResult {
        let mut result = PhaseResult::default();
        let mut next_repin = pins::REPIN_TOKENS;
        for step in self.replay.steps(phase) {
            if step.token >= next_repin
                && let Some(usage) = self.pinning.clone()
            {
                next_repin = step.token + pins::REPIN_TOKENS;
                self.repin(&usage);
            }
            let hits = self.step(&step);
            count(self.replay, &mut result, &step, hits);
        }
        result
    }

    fn step(&mut self, step: &Step<'_>) -> u64 {
        self.step += 1;
        self.uses.clear();
        for (&expert, &rows) in step.experts.iter().zip(step.rows_of) {
            self.uses.push((self.replay.id(expert).index, rows as usize));
            if let Some(needed) = self.needed.get_mut(expert as usize) {
                *needed = self.step;
            }
        }
        self.policy.routed(step.layer, step.rows as usize, &self.uses);
        let mut hits = 0;
        for &expert in step.experts {
            if self.resident.get(expert as usize) == Some(&true) {
                hits += 1;
                self.policy.used(self.replay.id(expert));
            }
        }
        for &expert in step.experts {
            if self.resident.get(expert as usize) == Some(&false) {
                self.load(expert);
            }
        }
        hits
    }

    fn load(&mut self, expert: u32) {
        let bytes = self.replay.bytes(expert);
        while self.used + bytes > self.room {
            let flag = |flags: &[bool], id| {
                self.replay.dense(id).and_then(|e| flags.get(e as usize).copied()).unwrap_or(false)
            };
            let idle = |&id: &ExpertId| {
                let needed = self.replay.dense(id).and_then(|e| self.needed.get(e as usize));
                needed != Some(&self.step)
            };
            let ordinary = |id: &ExpertId| !flag(&self.pinned, *id);
            let victim = self.policy.candidates().find(|id| idle(id) && ordinary(id));
            // A step larger than the room is computed in waves; pins go last.
            let victim = victim.or_else(|| self.policy.candidates().find(ordinary));
            let Some(victim) = victim.or_else(|| self.policy.candidates().next()) else { return };
            self.policy.evicted(victim);
            let Some(dense) = self.replay.dense(victim) else { return };
            mark(&mut self.resident, dense, false);
            self.used -= self.replay.bytes(dense);
        }
        self.used += bytes;
        mark(&mut self.resident, expert, true);
        self.policy.inserted(self.replay.id(expert));
    }
}

fn mark(flags: &mut [bool], expert: u32, value: bool) {
    if let Some(flag) = flags.get_mut(expert as usize) {
        *flag = value;
    }
}

#[cfg(test)]
mod tests;
