//! A replay over a plugin.

use std::ffi::c_int;
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use pushgate_net_caller::table::{Plugin, Ptr, use_device, warnings};
use pushgate_net_trace::Role;

use super::memory::Memory;
use super::script::{EndPlan, Post};

/// The ends of a process, over a plugin.
pub struct Calls {
    plugin: Plugin,
    ctx: Ptr,
    ends: Vec<Made>,
}

/// An end: what the plugin handed out, and a registration for each region of the plan; NULL where none was named.
struct Made {
    comm: Ptr,
    regions: Vec<(std::ops::Range<usize>, Ptr)>,
}

// SAFETY: NCCL passes such pointers between its threads too.
unsafe impl Send for Calls {}
// SAFETY: NCCL uses a plugin from several threads too; each end is used by one thread at a time.
unsafe impl Sync for Calls {}

/// The handle of each connection that this process receives over.
pub type Handles = Vec<(usize, Vec<u8>)>;

/// Listeners of a process.
pub struct Listening {
    plugin: Plugin,
    ctx: Ptr,
    listeners: Vec<Option<Ptr>>,
}

fn said(what: &str) -> impl FnOnce(pushgate_net_caller::table::Failed) -> anyhow::Error {
    let what = what.to_owned();
    move |e| match warnings().last() {
        Some(last) => anyhow!("{what}: {e}; the plugin says: {last}"),
        None => anyhow!("{what}: {e}"),
    }
}

impl Listening {
    /// Loads the plugin and listens for each end that receives.
    pub fn open(plugin: Plugin, ends: &[EndPlan]) -> Result<(Listening, Handles)> {
        let ctx = plugin.init().map_err(said("the plugin"))?;
        let devices = plugin.devices().map_err(said("the plugin"))?;
        ensure!(devices > 0, "the plugin has no device");
        let mut handles = Vec::new();
        let mut listeners = Vec::new();
        for end in ends {
            listeners.push(match end.role {
                Role::Send => None,
                Role::Receive => {
                    use_device(end.device as c_int % devices);
                    let (listener, handle) = plugin.listen(ctx).map_err(said("listen"))?;
                    handles.push((end.connection, handle.into()));
                    Some(listener)
                }
            });
        }
        Ok((Listening { plugin, ctx, listeners }, handles))
    }

    /// Connects all ends, and registers their memory.
    pub fn connect(
        self,
        ends: &[EndPlan],
        memories: &[Memory],
        handles: &Handles,
        until: Instant,
    ) -> Result<Calls> {
        let Listening { plugin, ctx, listeners } = self;
        let devices = plugin.devices().map_err(said("the plugin"))?;
        let mut handles: Vec<Option<[u8; 128]>> = ends
            .iter()
            .map(|end| {
                let found = handles.iter().find(|(connection, _)| *connection == end.connection);
                found.and_then(|(_, bytes)| bytes.as_slice().try_into().ok())
            })
            .collect();
        let mut comms = vec![None; ends.len()];
        while comms.iter().any(Option::is_none) {
            for (i, end) in ends.iter().enumerate().filter(|(i, _)| comms[*i].is_none()).collect::<Vec<_>>() {
                use_device(end.device as c_int % devices);
                comms[i] = match listeners[i] {
                    Some(listener) => plugin.accept(listener).map_err(said("accept"))?,
                    None => {
                        let handle = handles[i].as_mut().context("a connection nobody listens for")?;
                        plugin.connect(ctx, handle).map_err(said("connect"))?
                    }
                };
            }
            if Instant::now() > until {
                bail!(
                    "{} of {} ends are not connected in time",
                    comms.iter().filter(|c| c.is_none()).count(),
                    ends.len()
                );
            }
            std::thread::yield_now();
        }
        for listener in listeners.into_iter().flatten() {
            plugin.close_listen(listener).map_err(said("closeListen"))?;
        }
        let mut made = Vec::new();
        for ((end, memory), comm) in ends.iter().zip(memories).zip(comms) {
            let comm = comm.expect("all are connected");
            let mut regions = Vec::new();
            for region in &end.regions {
                let mr = match region.registered {
                    true => {
                        plugin.reg_mr(comm, memory.at(region.offset), region.bytes).map_err(said("regMr"))?
                    }
                    false => std::ptr::null_mut(),
                };
                regions.push((region.offset..region.offset + region.bytes, mr));
            }
            made.push(Made { comm, regions });
        }
        Ok(Calls { plugin, ctx, ends: made })
    }
}

impl Calls {
    /// The end's registration of the memory from `offset` on.
    fn mr(&self, end: usize, offset: usize, registered: bool) -> Ptr {
        let regions = &self.ends[end].regions;
        let at = regions.partition_point(|(range, _)| range.start <= offset) - 1;
        if registered { regions[at].1 } else { std::ptr::null_mut() }
    }

    pub fn post(&self, end: usize, role: Role, post: &Post, memory: &Memory) -> Result<Option<Ptr>> {
        let comm = self.ends[end].comm;
        match role {
            Role::Send => {
                let part = &post.parts[0];
                let mr = self.mr(end, part.offset, part.registered);
                let (data, tag) = (memory.at(part.offset), part.tag as c_int);
                // SAFETY: the memory stays until the ends are closed, and what is sent never changes.
                unsafe { self.plugin.isend(comm, data, part.size, tag, mr) }.map_err(said("isend"))
            }
            Role::Receive => {
                let parts = || post.parts.iter();
                let data: Vec<_> = parts().map(|p| memory.at(p.offset)).collect();
                let sizes: Vec<_> = parts().map(|p| p.room).collect();
                let tags: Vec<_> = parts().map(|p| p.tag as c_int).collect();
                let mrs: Vec<_> = parts().map(|p| self.mr(end, p.offset, p.registered)).collect();
                // SAFETY: the memory stays until the ends are closed, and is left alone until the request is done.
                unsafe { self.plugin.irecv(comm, &data, &sizes, &tags, &mrs) }.map_err(said("irecv"))
            }
        }
    }

    /// Whether a request is done, and then the bytes of each of its buffers.
    pub fn test(&self, role: Role, request: Ptr) -> Result<Option<[c_int; 8]>> {
        let done = match role {
            Role::Send => {
                // SAFETY: the request is not done yet, and its end not closed.
                unsafe { self.plugin.test_send(request, true) }.map(|done| done.then_some([0; 8]))
            }
            // SAFETY: as above.
            Role::Receive => unsafe { self.plugin.test_receive(request, true) },
        };
        done.map_err(said("test"))
    }

    /// Deregisters and closes all ends.
    pub fn close(self, ends: &[EndPlan]) -> Result<()> {
        for (made, end) in self.ends.iter().zip(ends) {
            for (_, mr) in made.regions.iter().filter(|(_, mr)| !mr.is_null()) {
                self.plugin.dereg_mr(made.comm, *mr).map_err(said("deregMr"))?;
            }
            match end.role {
                Role::Send => self.plugin.close_send(made.comm),
                Role::Receive => self.plugin.close_recv(made.comm),
            }
            .map_err(said("close"))?;
        }
        self.plugin.finalize(self.ctx).map_err(said("finalize"))
    }
}
