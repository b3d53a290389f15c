//! The local expert store: a RAM budget of cached slots over an [`ExpertSource`].

use std::sync::Arc;

use super::{ExpertCompute, ExpertError, ExpertLayout, ExpertSource, RoutedBatch};
use crate::fixed::FixedRows;
use crate::kernels::Kernels;
use crate::profile::NumericProfile;

/// Counters of a store since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreStats {
    /// Experts computed.
    pub computed: u64,
    /// Served from RAM.
    pub hits: u64,
    /// Read from disk.
    pub misses: u64,
    /// Bytes read.
    pub bytes_read: u64,
}

/// Computes experts from a container or pack on this machine.
pub struct LocalStore {
    source: Arc<dyn ExpertSource>,
}

impl LocalStore {
    /// Opens a store that keeps at most `ram_bytes` of records resident.
    ///
    /// # Errors
    /// [`ExpertError::Budget`] when not even one record fits.
    pub fn new(
        source: Arc<dyn ExpertSource>,
        kernels: Kernels,
        profile: NumericProfile,
        ram_bytes: usize,
    ) -> Result<Self, ExpertError> {
        let _ = (kernels, profile, ram_bytes);
        Ok(Self { source })
    }

    /// Counters so far.
    pub fn stats(&self) -> StoreStats {
        todo!()
    }

    /// The source read from.
    pub fn source(&self) -> &Arc<dyn ExpertSource> {
        &self.source
    }
}

impl ExpertCompute for LocalStore {
    fn compute(&self, batch: &RoutedBatch, meanwhile: &mut dyn FnMut()) -> Result<FixedRows, ExpertError> {
        let _ = (batch, meanwhile);
        todo!()
    }

    fn layout(&self) -> &ExpertLayout {
        self.source.layout()
    }
}
