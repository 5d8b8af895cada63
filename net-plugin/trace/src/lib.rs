//! Traces of the calls that NCCL makes to the plugin: the file of one end of a connection.
//!
//! The plugin writes a file for each end while the setting `net-trace` names a folder, and `pushgate bench nccl-trace` replays all
//! files of a folder. A file is a [`Header`] and [`Record`]s of one length, in the machine's order of bytes: what is written on
//! NCCL's threads needs no encoding. [`layout`] has both, [`end`] what a file means and how one is checked, [`ring`] makes traces without NCCL.

pub mod end;
pub mod layout;
pub mod ring;

pub use end::{Buffer, End, Event, Memory, TraceError, What, file_name, folder};
pub use layout::{Header, Kind, Record, Role, VERSION};
pub use ring::Ring;

/// How the name of a trace's file ends.
pub const EXTENSION: &str = "pgtrace";
