//! Parameters of a machine that the formulas cannot know. A probe fits them; the defaults are given
//! below with their sources.

use serde::{Deserialize, Serialize};

use crate::error::{Result, within};
use crate::link::Link;

/// What the formulas need to know about a machine. Times in ns, bandwidths in GB/s (bytes a
/// nanosecond), sizes in bytes.
///
/// A default called *measured* comes from this project, from one host: an H200 on PCIe 5 x16,
/// driver 580. The figures that it is fitted to are in docs/pcie-model.md. Absolute times of other
/// hosts differ.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Parameters {
    /// Round trip of a read of host memory by a device at the root complex, memory included. 550:
    /// pcie-bench (SIGCOMM 2018), 64 B DMA reads on Xeons, 547 to 550 ns.
    pub rtt_ns: f64,
    /// The memory's part of that round trip. 100: DRAM or a cache of the host; assumed.
    pub memory_ns: f64,
    /// How much longer a read of GPU memory takes than one of host memory. 300: an L2 access;
    /// assumed.
    pub gpu_memory_ns: f64,
    /// Latency of a switch, one way. 100: data sheets of Gen4 and Gen5 switches say 100 to 150; 100
    /// reproduces the same-switch figures of PEX890xx machines.
    pub switch_ns: f64,
    /// Latency of a root complex between two of its ports, one way. 450: FlexDriver (ASPLOS 2022).
    pub root_ns: f64,
    /// Latency of the link between sockets, one way. 290: peer latencies of an EPYC Turin machine,
    /// 0.72 us within a node and 1.3 across.
    pub socket_ns: f64,
    /// Whether every hop takes in a whole TLP before sending it on. False: switches cut through.
    pub store_and_forward: bool,

    /// Time between an SM and the GPU's port, there and back. 650: measured, flags relayed between
    /// GPU and CPU.
    pub sm_ns: f64,
    /// TLP payload of coalesced stores, 4 to MPS. 256: H100 and H200 reach 52.2 to 52.8 GB/s.
    pub store_tlp: u32,
    /// Number of threads that store. 2048: two blocks of 1024, enough for Gen5 x16 (measured).
    pub store_threads: u32,
    /// Bytes of one store of a thread. 16.
    pub store_bytes: u32,
    /// Time between two stores of one thread in a long series. 400: measured, the same for 4 to 16
    /// bytes.
    pub store_interval_ns: f64,
    /// Time between two dependent rounds of loads of one thread. 1420: measured, under load.
    pub load_interval_ns: f64,
    /// Time from one bulk store (TMA) of a buffer until the buffer is free for the next. 2000:
    /// measured, 16 KiB.
    pub bulk_interval_ns: f64,
    /// Whether a system fence stands between payload and WQE, which costs a round trip. True:
    /// without a fence nothing orders a WQE that lands in another place than its payload.
    pub fence: bool,
    /// Time from a flag that a GPU sees until the GPU issues its answer. 150: measured.
    pub gpu_turn_ns: f64,

    /// Time of a copy by the copy engine in addition to its bytes. 2900: measured, 4 KiB to 4 MiB
    /// on a stream.
    pub copy_launch_ns: f64,
    /// Bandwidth of the copy engine to host memory. 55.4: measured.
    pub copy_gbs: f64,
    /// Bytes that are moved as one piece before the copy of the next piece begins. 512 KiB: a slice
    /// of NCCL's buffers.
    pub chunk: u64,

    /// Time from a WQE in host memory until the CPU has rung the NIC's doorbell. 150: measured, a
    /// relayed flag.
    pub cpu_turn_ns: f64,
    /// CPU time of a write-combined store of up to 64 bytes. 80: gdrcopy on V100, 89 ns with the 64 bytes' wire time.
    pub cpu_store_ns: f64,

    /// Time of a read by the NIC of its own memory. 50: assumed.
    pub nic_memory_ns: f64,
    /// Bytes of completions that the reader has room for; none: as many as its tags ask for.
    pub completion_buffer: Option<u64>,
    /// GB/s of writes between peers that a root complex passes; none: as much as the link. Desktop
    /// processors and old servers pass less; 0: nothing.
    pub root_write_gbs: Option<f64>,
    /// GB/s of reads between peers that a root complex passes; none: as much as the link. 0: such
    /// reads fail, as on Intel's client processors.
    pub root_read_gbs: Option<f64>,
}

impl Default for Parameters {
    fn default() -> Self {
        Parameters {
            rtt_ns: 550.0,
            memory_ns: 100.0,
            gpu_memory_ns: 300.0,
            switch_ns: 100.0,
            root_ns: 450.0,
            socket_ns: 290.0,
            store_and_forward: false,
            sm_ns: 650.0,
            store_tlp: 256,
            store_threads: 2048,
            store_bytes: 16,
            store_interval_ns: 400.0,
            load_interval_ns: 1420.0,
            bulk_interval_ns: 2000.0,
            fence: true,
            gpu_turn_ns: 150.0,
            copy_launch_ns: 2900.0,
            copy_gbs: 55.4,
            chunk: 512 << 10,
            cpu_turn_ns: 150.0,
            cpu_store_ns: 80.0,
            nic_memory_ns: 50.0,
            completion_buffer: None,
            root_write_gbs: None,
            root_read_gbs: None,
        }
    }
}

impl Parameters {
    /// Checks that the parameters are possible on this link.
    ///
    /// # Errors
    /// The first parameter that is not allowed, with the allowed values.
    pub fn check(&self, link: &Link) -> Result<()> {
        const SECOND: f64 = 1e9;
        within("rtt_ns", self.rtt_ns, 1.0, SECOND)?;
        within("memory_ns", self.memory_ns, 0.0, self.rtt_ns)?;
        for (name, ns) in [
            ("gpu_memory_ns", self.gpu_memory_ns),
            ("switch_ns", self.switch_ns),
            ("root_ns", self.root_ns),
            ("socket_ns", self.socket_ns),
            ("sm_ns", self.sm_ns),
            ("gpu_turn_ns", self.gpu_turn_ns),
            ("copy_launch_ns", self.copy_launch_ns),
            ("cpu_turn_ns", self.cpu_turn_ns),
            ("cpu_store_ns", self.cpu_store_ns),
            ("nic_memory_ns", self.nic_memory_ns),
        ] {
            within(name, ns, 0.0, SECOND)?;
        }
        for (name, ns) in [
            ("store_interval_ns", self.store_interval_ns),
            ("load_interval_ns", self.load_interval_ns),
            ("bulk_interval_ns", self.bulk_interval_ns),
        ] {
            within(name, ns, 0.01, SECOND)?;
        }
        link.check_tlp(self.store_tlp)?;
        within("store_threads", self.store_threads.into(), 1.0, 1e7)?;
        within("store_bytes", self.store_bytes.into(), 1.0, 32.0)?;
        within("copy_gbs", self.copy_gbs, 1e-3, 1e4)?;
        within("chunk", self.chunk as f64, 4096.0, 1e12)?;
        if let Some(bytes) = self.completion_buffer {
            within("completion_buffer", bytes as f64, link.mrrs.into(), 1e12)?;
        }
        for (name, cap) in [("root_write_gbs", self.root_write_gbs), ("root_read_gbs", self.root_read_gbs)] {
            if let Some(gbs) = cap {
                within(name, gbs, 0.0, 1e4)?;
            }
        }
        Ok(())
    }

    /// One-way latency between two devices without a hop: half of the round trip, less the memory.
    pub fn wire_ns(&self) -> f64 {
        (self.rtt_ns - self.memory_ns) / 2.0
    }
}
