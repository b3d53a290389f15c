//! Clusters of real processes.
