//! Tests of the check over images in memory.
