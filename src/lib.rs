//! pushgate.
