//! The values of settings that are a choice.

/// Where windows come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WindowKind {
    /// Shared memory of the host.
    Memory,
    /// Pages of the kernel module.
    Staging,
    /// A slice of a PCI function's BAR, by the kernel module.
    Bar,
}

/// The transport of queue pairs, as it is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum QpKind {
    /// For each pair of ranks: see [`Settings::transports`](super::Settings::transports); the NCCL plugin chooses for each connection.
    Auto,
    /// Between ranks of one host.
    Local,
    /// RDMA: InfiniBand, RoCE or soft-RoCE, between ranks anywhere.
    Verbs,
    /// TCP, between ranks anywhere.
    Tcp,
}

/// The transport of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Transport {
    /// Shared memory of one host.
    Local,
    /// RDMA.
    Verbs,
    /// TCP.
    Tcp,
}

impl Transport {
    /// The names of several transports, as in `local+tcp`.
    pub fn names(all: &[Transport]) -> String {
        all.iter().map(Transport::to_string).collect::<Vec<_>>().join("+")
    }
}

/// What moves the bytes of queue pairs over TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TcpIo {
    /// io_uring where it is allowed and faster, else plain sockets.
    Auto,
    /// io_uring; an error where the kernel refuses it.
    IoUring,
    /// Plain sockets.
    Socket,
}

impl From<TcpIo> for pushgate_link_tcp::Io {
    fn from(io: TcpIo) -> Self {
        match io {
            TcpIo::Auto => Self::Auto,
            TcpIo::IoUring => Self::Uring,
            TcpIo::Socket => Self::Socket,
        }
    }
}

/// How an engine hears of completions of an RDMA device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CqEvents {
    /// Events where the engine may sleep, else polling.
    Auto,
    /// The engine polls the completion queue.
    Poll,
    /// An event of the device wakes the engine.
    Event,
}

/// Where the proxy's engine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyPlace {
    /// A thread of this process.
    Thread,
    /// A `pushgate proxy` process.
    Process,
}

/// What drives the proxy's engine, where that runs in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriveChoice {
    /// In the NCCL plugin the caller, elsewhere a thread.
    Auto,
    /// A thread of the engine's own.
    Thread,
    /// Calls of the program, which polls anyway. A thread stands in while the program does not call.
    Caller,
}

/// Where WQE rings and control words lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingsPlace {
    /// In host memory of their own.
    Host,
    /// In the window, before the payload.
    Window,
}

/// What the NCCL plugin does with GPU memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetPath {
    /// The plugin chooses.
    Auto,
    /// The GPU pushes it into the window.
    Push,
    /// The NIC reads it.
    Pull,
    /// NCCL's kernels push to host memory, which is sent.
    Bounce,
}

/// Where the NCCL plugin has messages for GPU memory arrive over RDMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetLanding {
    /// The plugin chooses.
    Auto,
    /// In the GPU's memory: the RDMA device writes there.
    Gpu,
    /// In host memory, from which the GPU pulls.
    Host,
}

/// A value that may be left to the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AutoOr<T> {
    /// The program chooses.
    Auto,
    /// The program does without.
    None,
    /// This value.
    Is(T),
}
