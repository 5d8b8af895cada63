//! The proxy as a process of its own: [`server`] serves programs over a Unix socket, [`remote`] is a program's side of it,
//! [`wire`] what crosses.

pub mod folder;
mod frame_socket;
pub mod remote;
pub mod server;
mod socket_file;
pub mod users;
pub mod wire;
