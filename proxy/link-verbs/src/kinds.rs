//! What differs from one kind of RDMA device to another: one table. The link asks the table and never a device's name.
//!
//! The facts are of rdma-core's providers (`providers/siw`, `providers/erdma`, `providers/rxe`) and of the drivers in Linux
//! (`drivers/infiniband/sw`, `drivers/infiniband/hw/erdma`). docs/rdma.md, "Kinds of device", has the same table and says which
//! kinds were seen at work.

use pushgate_rdma_core_sys as sys;

/// What a device speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// InfiniBand's transport, on InfiniBand or on Ethernet (RoCE).
    Ib,
    /// RDMA over TCP.
    Iwarp,
    /// Something without reliable connected queue pairs, for example Amazon's EFA.
    Other,
}

impl Protocol {
    /// What `node_type` of a device says in sysfs, for example `1: CA` or `4: RNIC`; none for what is no such text.
    pub fn of_node_type(text: &str) -> Option<Self> {
        // `enum rdma_node_type` of the kernel.
        match text.split(':').next()?.trim().parse::<u32>().ok()? {
            1..=3 => Some(Protocol::Ib),
            4 => Some(Protocol::Iwarp),
            _ => Some(Protocol::Other),
        }
    }

    /// What libibverbs says of a device.
    pub(super) fn of_transport(transport: sys::ibv_transport_type) -> Self {
        match transport {
            sys::ibv_transport_type::IBV_TRANSPORT_IB => Protocol::Ib,
            sys::ibv_transport_type::IBV_TRANSPORT_IWARP => Protocol::Iwarp,
            _ => Protocol::Other,
        }
    }
}

/// A kind of RDMA device: a row of the table.
#[derive(Debug, PartialEq, Eq)]
pub struct Kind {
    /// The kind's name, for messages.
    pub name: &'static str,
    /// What its devices speak.
    pub protocol: Protocol,
    /// The vendor's number that its devices report; none: any that no other row has.
    pub vendor: Option<u32>,
    /// The devices have reliable connected queue pairs.
    pub connects: bool,
    /// Queue pairs come up through rdma_cm alone: the state RTS is refused by `ibv_modify_qp`.
    pub rdma_cm: bool,
    /// WRITE and SEND may carry immediate data.
    pub immediate: bool,
    /// A SEND without a posted receive is answered by an RNR NAK. Without, it ends the connection.
    pub rnr: bool,
    /// A receive has a scatter/gather element, be it of no bytes.
    pub receive_sge: bool,
    /// Most scatter/gather elements of a send and of a receive; none: the device says.
    pub most_sges: Option<[u32; 2]>,
    /// Most bytes that a work request may carry inline; none: the device says when a queue pair is made.
    pub inline: Option<u32>,
    /// A context serves few queue pairs, so each queue pair gets a context of its own. libsiw takes the key 0x90000 of a mapping for none at
    /// all, which is the key of the 144th page that a context maps.
    pub own_contexts: bool,
    /// Posting fails with a negative errno. The link takes either sign.
    pub negative_errno: bool,
    /// An asynchronous event tells that a queue pair came to the error state by itself. Without, rdma_cm tells the connection's end.
    pub state_told: bool,
    /// A queue pair in the error state takes work requests, and completes them with an error.
    pub posts_in_error: bool,
    /// Whatever was posted completes, also on a queue pair that broke by itself. Without, only the queue pair's destruction says that
    /// the device is done with it.
    pub flushes: bool,
    /// Where an RDMA READ puts what it has read must be registered for remote writes too.
    pub read_into_remote: bool,
    /// Atomic operations.
    pub atomics: bool,
    /// Registers memory that another device's driver exports.
    pub dma_buf: bool,
    /// The WRITEs that arrive on one queue pair are placed in the order in which they were posted.
    pub in_order: bool,
}

/// InfiniBand and RoCE adapters: what is usual.
const ADAPTER: Kind = Kind {
    name: "InfiniBand or RoCE adapter",
    protocol: Protocol::Ib,
    vendor: None,
    connects: true,
    rdma_cm: false,
    immediate: true,
    rnr: true,
    receive_sge: false,
    most_sges: None,
    inline: None,
    own_contexts: false,
    negative_errno: false,
    state_told: true,
    posts_in_error: true,
    flushes: true,
    read_into_remote: false,
    atomics: true,
    dma_buf: true,
    // A device may turn on out-of-order placement by itself where the fabric routes adaptively, and libibverbs tells the
    // order within one WRITE alone (ibv_query_qp_data_in_order(3)).
    in_order: false,
};

/// iWARP adapters: the least that any of them has.
const IWARP: Kind = Kind {
    name: "iWARP adapter",
    protocol: Protocol::Iwarp,
    rdma_cm: true,
    immediate: false,
    rnr: false,
    receive_sge: true,
    state_told: false,
    posts_in_error: false,
    flushes: false,
    read_into_remote: true,
    atomics: false,
    dma_buf: false,
    ..ADAPTER
};

/// All kinds. A device is of the first row that has its protocol and vendor.
pub static KINDS: [Kind; 7] = [
    // rdma_rxe drops every packet that is not the next one of its queue pair, and copies with the CPU.
    Kind { name: "soft-RoCE", vendor: Some(0xff_ffff), dma_buf: false, in_order: true, ..ADAPTER },
    // One TCP stream, which the CPU copies out of.
    Kind {
        name: "software iWARP",
        vendor: Some(0x62_6d74),
        most_sges: Some([6, 6]),
        inline: Some(80),
        own_contexts: true,
        negative_errno: true,
        in_order: true,
        ..IWARP
    },
    Kind { name: "eRDMA in RoCE mode", ..ERDMA },
    Kind {
        name: "eRDMA in iWARP mode",
        protocol: Protocol::Iwarp,
        rdma_cm: true,
        rnr: false,
        read_into_remote: true,
        ..ERDMA
    },
    ADAPTER,
    IWARP,
    Kind { name: "device without RC queue pairs", protocol: Protocol::Other, connects: false, ..ADAPTER },
];

/// Alibaba's elastic RDMA adapter (PCI 1ded:107f), which speaks RoCE v2 or iWARP, as its cloud has set it up.
const ERDMA: Kind = Kind {
    name: "eRDMA",
    vendor: Some(0x1ded),
    most_sges: Some([6, 1]),
    inline: Some(96),
    negative_errno: true,
    posts_in_error: false,
    dma_buf: false,
    ..ADAPTER
};

impl Kind {
    /// The kind of a device that speaks `protocol`, with the number that its vendor has (`ibv_device_attr.vendor_id`).
    pub fn of(protocol: Protocol, vendor: u32) -> &'static Kind {
        let fits = |kind: &&Kind| kind.protocol == protocol && kind.vendor.is_none_or(|v| v == vendor);
        KINDS.iter().find(fits).expect("each protocol has a row for any vendor")
    }

    /// Whether the completion of a WRITE says that the peer's device has its bytes. RDMA over TCP completes a WRITE once its bytes
    /// have left this end (RFC 5040, section 5.5); a READ after it completes when the WRITE is placed.
    pub(super) fn acknowledges(&self) -> bool {
        self.protocol != Protocol::Iwarp
    }

    /// What the peer may do to memory through a queue pair, and to this end's inbox: to write; to read too, where a READ is how the
    /// peer learns what has arrived.
    pub(super) fn access(&self) -> u32 {
        use sys::ibv_access_flags as access;
        access::IBV_ACCESS_REMOTE_WRITE.0
            | if self.acknowledges() { 0 } else { access::IBV_ACCESS_REMOTE_READ.0 }
    }

    /// What its devices lack of what the usual adapter has, for people; empty if nothing.
    pub fn lacks(&self) -> Vec<&'static str> {
        let all = [
            (!self.connects, "no RC queue pairs"),
            (self.rdma_cm, "connects through rdma_cm alone"),
            (!self.immediate, "no immediate data"),
            (!self.atomics, "no atomics"),
            (!self.dma_buf, "no dma-buf"),
        ];
        all.into_iter().filter_map(|(lacks, what)| lacks.then_some(what)).collect()
    }
}

/// The error of a call of libibverbs. A provider reports an errno in either sign: siw and eRDMA negative ones where a work
/// request is posted.
pub(super) fn failure(code: std::ffi::c_int) -> std::io::Error {
    std::io::Error::from_raw_os_error(code.saturating_abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_of_the_kind_of_its_protocol_and_vendor() {
        for (protocol, vendor, name) in [
            (Protocol::Ib, 0xff_ffff, "soft-RoCE"),
            (Protocol::Iwarp, 0x62_6d74, "software iWARP"),
            (Protocol::Ib, 0x1ded, "eRDMA in RoCE mode"),
            (Protocol::Iwarp, 0x1ded, "eRDMA in iWARP mode"),
            (Protocol::Ib, 0x02c9, "InfiniBand or RoCE adapter"),
            (Protocol::Iwarp, 0x1425, "iWARP adapter"),
            // A vendor's number says nothing about another protocol.
            (Protocol::Iwarp, 0xff_ffff, "iWARP adapter"),
            (Protocol::Other, 0x1d0f, "device without RC queue pairs"),
        ] {
            assert_eq!(Kind::of(protocol, vendor).name, name);
        }
    }

    #[test]
    fn every_row_of_the_table_is_the_kind_of_some_device() {
        for kind in &KINDS {
            assert_eq!(Kind::of(kind.protocol, kind.vendor.unwrap_or(0)), kind);
        }
    }

    fn row(kind: &Kind) -> String {
        let yes = |b: bool| if b { "yes" } else { "no" }.to_owned();
        let number = |n: Option<u32>| n.map_or("as it says".into(), |n| n.to_string());
        let sges = kind.most_sges.map_or("as it says".into(), |[send, receive]| format!("{send}, {receive}"));
        let cells = [
            kind.name.to_owned(),
            format!("{:?}", kind.protocol),
            kind.vendor.map_or("any other".into(), |v| format!("{v:#x}")),
            yes(kind.rdma_cm),
            yes(kind.immediate),
            yes(kind.rnr),
            yes(kind.receive_sge),
            sges,
            number(kind.inline),
            yes(kind.own_contexts),
            if kind.negative_errno { "negative" } else { "positive" }.into(),
            yes(kind.state_told),
            yes(kind.posts_in_error),
            yes(kind.flushes),
            yes(kind.read_into_remote),
            yes(kind.atomics),
            yes(kind.dma_buf),
            yes(kind.in_order),
        ];
        format!("| {} |", cells.join(" | "))
    }

    #[test]
    fn the_page_has_the_same_table() {
        let page = include_str!("../../../docs/rdma.md");
        for kind in KINDS.iter().filter(|kind| kind.connects) {
            let row = row(kind);
            assert!(page.contains(&row), "docs/rdma.md lacks the row\n{row}");
        }
    }

    #[test]
    fn a_node_type_of_sysfs_says_the_protocol() {
        for (text, protocol) in [
            ("1: CA", Some(Protocol::Ib)),
            ("4: RNIC", Some(Protocol::Iwarp)),
            ("6: usNIC UDP", Some(Protocol::Other)),
            ("7: unspecified", Some(Protocol::Other)),
            ("", None),
            ("RNIC", None),
        ] {
            assert_eq!(Protocol::of_node_type(text), protocol, "{text:?}");
        }
    }

    #[test]
    fn an_errno_of_either_sign_is_the_same_error() {
        assert_eq!(failure(-22).raw_os_error(), Some(22));
        assert_eq!(failure(22).raw_os_error(), Some(22));
        assert_eq!(failure(i32::MIN).raw_os_error(), Some(i32::MAX));
    }
}
