//! Tests of the model reader against the recorded models, damaged copies of them, and models of
//! GLM-5.2's size made of headers only.

#![allow(clippy::unwrap_used, reason = "a helper of a test fails by panicking")]

mod config;
mod damage;
mod experts;
mod glm52;
mod mutations;
mod open;
mod support;
