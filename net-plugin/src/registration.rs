//! Memory that NCCL has registered with a connection, and the buffers of a receive.

use std::ops::Deref;
use std::os::fd::BorrowedFd;

use pushgate::copier::DeviceMemory;

use crate::error::{Code, Failure, Result};

/// A registration, as NCCL holds it.
#[derive(Clone, Copy, Debug)]
pub struct Mr {
    pub key: u32,
    pub address: usize,
    pub bytes: usize,
    /// The memory belongs to the lane's GPU.
    pub cuda: bool,
    /// The copier pushes out of this memory. The engine does not know the region, so `key` is
    /// unused.
    pub pushed: bool,
}

/// A registration with what keeps the memory at the copier, if the copier uses it.
#[derive(Debug)]
pub struct Held {
    pub mr: Mr,
    pub _device: Option<DeviceMemory>,
}

impl Deref for Held {
    type Target = Mr;

    fn deref(&self) -> &Mr {
        &self.mr
    }
}

/// The kind of memory that is registered.
#[derive(Clone, Copy)]
pub enum Kind<'a> {
    Host,
    /// Memory of the lane's GPU, with a dma-buf and the offset in it if NCCL has one.
    Cuda(Option<(BorrowedFd<'a>, u64)>),
}

impl Mr {
    /// The offset in the region of the `size` bytes at `data`.
    pub fn offset(&self, data: usize, size: usize) -> Result<u64> {
        let offset = data.checked_sub(self.address).filter(|o| *o <= self.bytes && size <= self.bytes - o);
        offset.map(|o| o as u64).ok_or_else(|| {
            let text = format!(
                "{size} bytes at {data:#x} leave their registration of {} bytes at {:#x}",
                self.bytes, self.address
            );
            Failure::new(Code::Usage, text)
        })
    }
}

/// One buffer of a receive.
#[derive(Clone, Copy)]
pub struct Wanted<'a> {
    pub data: usize,
    pub size: usize,
    pub tag: u32,
    pub mr: Option<&'a Mr>,
}
