//! The transports that are compared, and the variables of NCCL that choose each of them.

use std::path::Path;

/// What carries NCCL's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// The plugin, ranks taken for hosts.
    Pushgate,
    /// NCCL's shared memory of a host.
    Shm,
    /// NCCL's sockets on loopback, ranks taken for hosts.
    Socket,
    /// What NCCL takes by itself on a host: NVLink or PCIe from GPU to GPU, where it can.
    P2p,
}

/// One way in which a transport is run. The best way of a transport counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    pub transport: Transport,
    /// Threads of NCCL's sockets, and sockets of each.
    sockets: Option<u32>,
}

/// Variables that choose a transport. What the environment says of them is left out.
const CHOOSING: [&str; 9] = [
    "NCCL_NET",
    "NCCL_NET_PLUGIN",
    "NCCL_NET_PLUGIN_REF_COUNT",
    "NCCL_HOSTID",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_NTHREADS",
    "NCCL_NSOCKS_PERTHREAD",
    "NCCL_NVLS_ENABLE",
];
/// Variables that this program sets for its log.
const LOG: [&str; 3] = ["NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"];

/// Whether a variable of NCCL in the environment says nothing of a run here, because the program sets it.
pub fn is_ours(variable: &str) -> bool {
    CHOOSING.contains(&variable) || LOG.contains(&variable)
}

impl Transport {
    pub const ALL: [Transport; 4] = [Transport::Pushgate, Transport::Shm, Transport::Socket, Transport::P2p];

    pub fn name(self) -> &'static str {
        match self {
            Transport::Pushgate => "pushgate",
            Transport::Shm => "shm",
            Transport::Socket => "socket",
            Transport::P2p => "p2p",
        }
    }

    /// Whether NCCL takes this transport between ranks that share a GPU: they must seem to be hosts.
    pub fn may_share_a_gpu(self) -> bool {
        matches!(self, Transport::Pushgate | Transport::Socket)
    }

    pub fn ways(self) -> Vec<Way> {
        let sockets: &[Option<u32>] = if self == Transport::Socket { &[Some(1), Some(4)] } else { &[None] };
        sockets.iter().map(|sockets| Way { transport: self, sockets: *sockets }).collect()
    }
}

impl Way {
    pub fn name(self) -> String {
        match self.sockets {
            Some(n) => format!("{} {n}x{n}", self.transport.name()),
            None => self.transport.name().into(),
        }
    }

    /// The variables of a rank: values to set, and variables to leave out.
    pub fn variables(
        self,
        rank: u32,
        plugin: &Path,
    ) -> (Vec<(&'static str, String)>, &'static [&'static str]) {
        // NVLink SHARP has no counterpart in a network.
        let mut set = vec![("NCCL_NVLS_ENABLE", "0".to_owned())];
        let mut put = |name, value: &str| set.push((name, value.to_owned()));
        if matches!(self.transport, Transport::Pushgate | Transport::Socket) {
            put("NCCL_HOSTID", &format!("pushgate-rank-{rank}"));
        }
        if self.transport != Transport::Pushgate {
            put("NCCL_NET_PLUGIN", "none");
        }
        match self.transport {
            Transport::Pushgate => {
                put("NCCL_NET_PLUGIN", &plugin.to_string_lossy());
                put("NCCL_NET", "pushgate");
                put("NCCL_NET_PLUGIN_REF_COUNT", "1");
            }
            Transport::Shm => put("NCCL_P2P_DISABLE", "1"),
            Transport::Socket => {
                let n = self.sockets.unwrap_or(1).to_string();
                put("NCCL_NET", "Socket");
                put("NCCL_SOCKET_NTHREADS", &n);
                put("NCCL_NSOCKS_PERTHREAD", &n);
                if std::env::var_os("NCCL_SOCKET_IFNAME").is_none() {
                    put("NCCL_SOCKET_IFNAME", "lo");
                }
            }
            Transport::P2p => {}
        }
        (set, &CHOOSING)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_transport_is_chosen_by_its_variables_alone() {
        let of = |way: Way| {
            let (set, unset) = way.variables(1, Path::new("/p.so"));
            assert!(["NCCL_NET", "NCCL_SHM_DISABLE", "NCCL_HOSTID"].iter().all(|name| unset.contains(name)));
            set.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
        };
        let all = |t: Transport| t.ways().into_iter().map(of).collect::<Vec<_>>();
        assert_eq!(
            all(Transport::Pushgate),
            ["NCCL_NVLS_ENABLE=0 NCCL_HOSTID=pushgate-rank-1 NCCL_NET_PLUGIN=/p.so NCCL_NET=pushgate \
              NCCL_NET_PLUGIN_REF_COUNT=1"]
        );
        assert_eq!(all(Transport::Shm), ["NCCL_NVLS_ENABLE=0 NCCL_NET_PLUGIN=none NCCL_P2P_DISABLE=1"]);
        assert_eq!(all(Transport::P2p), ["NCCL_NVLS_ENABLE=0 NCCL_NET_PLUGIN=none"]);
        let sockets = all(Transport::Socket);
        assert_eq!(sockets.len(), 2);
        for (line, n) in sockets.iter().zip(["1", "4"]) {
            assert!(
                line.contains("NCCL_HOSTID=pushgate-rank-1 NCCL_NET_PLUGIN=none NCCL_NET=Socket"),
                "{line}"
            );
            assert!(line.contains(&format!("NCCL_SOCKET_NTHREADS={n} NCCL_NSOCKS_PERTHREAD={n}")), "{line}");
        }
        let names: Vec<_> = Transport::Socket.ways().into_iter().map(Way::name).collect();
        assert_eq!(names, ["socket 1x1", "socket 4x4"]);
    }
}
