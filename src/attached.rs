//! The device's end of a queue pair whose proxy runs elsewhere and shares nothing with the device
//! but a window: on the far side of a BAR, of a virtual machine, or on a DPU.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use pushgate_driver_shim::abi;
use pushgate_driver_shim::placed::Placed;
use pushgate_driver_shim::provider::FileWindow;
use pushgate_driver_shim::window::Piece;
use pushgate_gpu_kernels::{DeviceBuffer, Registration};

use crate::context::Context;
use crate::error::{Error, Result};
use crate::qp::{DeviceEnd, check_status, device_addresses, ring};
use crate::relay::{Relay, RelayStats};

/// A queue pair whose proxy runs on another machine or in another process, which made it with the
/// setting `rings = window`.
///
/// This side's kernels send over it as over any other queue pair. Messages that arrive land in the
/// control segment, because nothing else is shared.
///
/// All kernels that use it must end before it is dropped. May be used from any thread.
pub struct AttachedQueuePair {
    // Fields drop in this order: the memory is unregistered before it is unmapped.
    descriptor: abi::pushgate_qp,
    relay: Option<Relay>,
    _registration: Registration,
    _state: DeviceBuffer,
    control: Piece,
    rank: u32,
    context: Context,
    _bell: Option<OwnedFd>,
}

impl AttachedQueuePair {
    /// Attaches to the window that begins at byte `offset` of `file`: a PCI function's BAR
    /// (`/sys/bus/pci/devices/FUNCTION/resourceN`, with `io_memory` true), or the memory that backs a
    /// virtual machine's BAR (with `io_memory` false).
    ///
    /// `bell` wakes the proxy: an eventfd that ends in the function's interrupt. The CPU executor
    /// writes the eventfd from its kernels; for a GPU, a thread of this process watches a word that
    /// the kernels store to and writes the eventfd. Without `bell` the proxy notices messages at
    /// its next look: a proxy whose function has interrupts sleeps up to 100 ms between looks.
    ///
    /// What lies at `offset` is checked. Anything but a window is refused, and so is a window that
    /// a device has used before, because this end begins counting at 0.
    pub fn new(
        context: &Context,
        file: &Path,
        offset: u64,
        io_memory: bool,
        bell: Option<OwnedFd>,
    ) -> Result<Self> {
        let open = || -> std::io::Result<FileWindow> {
            let bytes = std::fs::metadata(file)?.len().saturating_sub(offset);
            FileWindow::open(file, offset, bytes as usize, io_memory)
        };
        let window = open().map_err(Error::io(format!("mapping {} from {offset}", file.display())))?;
        let placed = Placed::find(Arc::new(window))?;
        // A device begins at 0. Counts that an earlier device left would be taken for this one's:
        // messages that were never sent would count as received.
        if let Some(found) = placed.used() {
            let window = format!("{} from {offset} ({found})", file.display());
            let allowed = "one that no device has used: make the proxy's queue pair anew";
            return Err(Error::config("window", window, allowed));
        }
        let (registration, [window, work_at, control_at]) = context.register_placed(&placed)?;
        let Placed { geometry: g, control, .. } = placed;
        let state = context.alloc(size_of::<abi::pushgate_qp_state>())?;
        let cpu = context.device() == "cpu";
        let (relay, bell, doorbell, doorbell_arg) = match bell {
            None => (None, None, 0, 0),
            Some(fd) if cpu => {
                let number = fd.as_raw_fd() as u64;
                (None, Some(fd), ring as extern "C" fn(u64) as usize as u64, number)
            }
            Some(fd) => {
                let relay = Relay::start(context, fd)?;
                let word = relay.address();
                (Some(relay), None, word, 1)
            }
        };
        let descriptor = abi::pushgate_qp {
            // Whether the proxy sleeps is known to the driver of the interrupt, not here.
            sleeping: 0,
            doorbell,
            doorbell_arg,
            // Nothing is received in place on this side.
            peer_window: 0,
            peer_window_log: 0,
            state: state.addr(),
            limit_ns: context.settings().timeout.as_nanos() as u64,
            peer: abi::PUSHGATE_NO_RANK,
            ..device_addresses(&g, window, work_at, control_at)
        };
        Ok(AttachedQueuePair {
            descriptor,
            relay,
            _registration: registration,
            _state: state,
            control,
            rank: g.rank,
            context: context.clone(),
            _bell: bell,
        })
    }

    /// Counters of the thread that rings on behalf of a GPU; `None` without such a thread.
    pub fn relay(&self) -> Option<RelayStats> {
        self.relay.as_ref().map(Relay::stats)
    }

    /// The largest message in bytes: the size of the window's payload.
    pub fn max_message(&self) -> u64 {
        (abi::PUSHGATE_UNIT as u64) << self.descriptor.window_log
    }

    /// Fails with the cause if the queue pair has ended.
    pub fn check(&self) -> Result<()> {
        self.context.here()?;
        check_status(&self.control, self.rank)
    }
}

impl DeviceEnd for AttachedQueuePair {
    fn descriptor(&self) -> abi::pushgate_qp {
        self.descriptor
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{DeviceChoice, Settings};
    use pushgate_driver_shim::placed;
    use pushgate_driver_shim::segment::Geometry;
    use std::sync::atomic::Ordering;

    #[test]
    fn p6_a_window_that_a_device_has_used_is_refused() {
        let g = Geometry {
            window_log: 6,
            slots_log: 3,
            cq_log: 3,
            rx_log: 3,
            link_log: 3,
            landing_log: 6,
            signals: 4,
            rank: 0,
        };
        let path = std::env::temp_dir().join(format!("pushgate-attached-{}", std::process::id()));
        std::fs::write(&path, vec![0; placed::bytes(&g)]).unwrap();
        let window = FileWindow::open(&path, 0, placed::bytes(&g), false).unwrap();
        let placed = Placed::write(Arc::new(window), &g).unwrap();
        let settings = Settings { device: DeviceChoice::Cpu, ..Settings::default() };
        let context = Context::builder().settings(settings).build().unwrap();
        let attach = || AttachedQueuePair::new(&context, &path, 0, false, None);
        drop(attach().unwrap());
        placed.control.words(abi::PUSHGATE_CTL_CREDIT as usize, 1)[0].store(9, Ordering::Relaxed);
        let e = attach().err().expect("it was used").to_string();
        assert!(e.contains("(credit 0x9)`: expected one that no device has used"), "{e}");
        std::fs::remove_file(&path).unwrap();
    }
}
