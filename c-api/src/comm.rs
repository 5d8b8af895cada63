//! Communicators: the ranks of a job.

use std::ffi::{c_char, c_int, c_void};
use std::io;
use std::sync::Arc;

use pushgate::settings::Transport;
use pushgate::{Bootstrap, Comm, Context, UniqueId};

use crate::arguments::{Out, bytes, bytes_mut, text};
use crate::boundary::{Failure, Result, call};
use crate::codes::*;
use crate::context::{pushgate_context, pushgate_unique_id};
use crate::table::{self, Object};

/// Queue pairs to that rank go through shared memory of this host.
pub const PUSHGATE_TRANSPORT_LOCAL: u32 = 1;
/// Queue pairs to that rank go over RDMA.
pub const PUSHGATE_TRANSPORT_VERBS: u32 = 2;
/// Queue pairs to that rank go over TCP.
pub const PUSHGATE_TRANSPORT_TCP: u32 = 3;

/// One rank's view of a job. Any thread may use one; a collective (barrier, all_gather) is called by one thread of every rank at
/// once.
pub struct pushgate_comm;

/// A communicator, with the context that it was made with.
pub(crate) struct CommObject {
    pub(crate) comm: Comm,
    _context: Arc<Context>,
}

impl Object for CommObject {
    type Handle = pushgate_comm;
    const NAME: &'static str = "communicator";
}

/// Makes a communicator with `join`.
///
/// # Safety
/// As [`Out::handle`].
unsafe fn create(
    context: *const pushgate_context,
    out: *mut *mut pushgate_comm,
    join: impl FnOnce(&Context) -> Result<Comm>,
) -> Result<()> {
    // SAFETY: the caller's promise.
    let out = unsafe { Out::handle("comm", out)? };
    let context = table::get::<Context>(context)?;
    out.put(table::open(CommObject { comm: join(&context)?, _context: context }));
    Ok(())
}

/// Joins the communicator of `job` as rank `rank` of `ranks`. The other ranks are processes that were given the same job, and
/// with the setting `rendezvous` they may run on any host. Waits for all of them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_comm_connect(
    context: *const pushgate_context,
    job: *const c_char,
    rank: u32,
    ranks: u32,
    comm: *mut *mut pushgate_comm,
) -> c_int {
    // SAFETY: the header's rules for pointers, which the program keeps.
    call(|| unsafe { create(context, comm, |c| Ok(Comm::connect(c, text("job", job)?, rank, ranks)?)) })
}

/// Joins the job that a launcher started this process for: `pushgate run`, torchrun, mpirun, srun, or the variables
/// PUSHGATE_RANK and PUSHGATE_RANKS. Waits for all ranks. No other thread changes the environment meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_comm_from_environment(
    context: *const pushgate_context,
    comm: *mut *mut pushgate_comm,
) -> c_int {
    // SAFETY: the header's rules for pointers, which the program keeps.
    call(|| unsafe { create(context, comm, |c| Ok(Comm::from_environment(c)?)) })
}

/// Joins the communicator of an id as rank `rank` of `ranks`. Waits for all ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_comm_connect_id(
    context: *const pushgate_context,
    id: *const pushgate_unique_id,
    rank: u32,
    ranks: u32,
    comm: *mut *mut pushgate_comm,
) -> c_int {
    call(|| {
        // SAFETY: the header's rules for pointers, which the program keeps.
        unsafe {
            create(context, comm, |c| {
                if id.is_null() {
                    return Err(Failure::argument("id", "NULL, expected a unique id"));
                }
                let id = UniqueId::from_bytes(bytes("id", id.cast(), UniqueId::BYTES)?)?;
                Ok(Comm::connect_with(c, &id, rank, ranks)?)
            })
        }
    })
}

/// Exchanges bytes between all ranks by a way of the program's own, as MPI_Allgather does. A collective, in which all ranks give
/// equally many bytes.
///
/// `bytes` holds this rank's `length` bytes, `all` has room for `length` bytes of each rank, in the order of ranks, and `user` is
/// what the program gave. Returns 0, or another number if the exchange failed; it should fail when a rank does not come. It must
/// return, and not by an exception or longjmp.
pub type pushgate_all_gather = Option<
    unsafe extern "C" fn(bytes: *const c_void, length: usize, all: *mut c_void, user: *mut c_void) -> c_int,
>;

/// A [`Bootstrap`] by a function of the program.
struct Exchange {
    rank: u32,
    ranks: u32,
    all_gather: unsafe extern "C" fn(*const c_void, usize, *mut c_void, *mut c_void) -> c_int,
    user: *mut c_void,
}

impl Bootstrap for Exchange {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.ranks
    }

    fn all_gather(&self, bytes: &[u8]) -> io::Result<Vec<Vec<u8>>> {
        let mut all = vec![0u8; bytes.len() * self.ranks as usize];
        let (from, to) = (bytes.as_ptr().cast(), all.as_mut_ptr().cast());
        // SAFETY: the function is one of this type, by the header's rules; `bytes` and `all` have as many bytes as the function
        // is told, and live until it returns.
        match unsafe { (self.all_gather)(from, bytes.len(), to, self.user) } {
            0 => Ok(all.chunks_exact(bytes.len()).map(<[u8]>::to_vec).collect()),
            code => Err(io::Error::other(format!("the function that the program gave returned {code}"))),
        }
    }
}

/// Joins a communicator of `ranks` ranks, which exchange what they need by a function of the program: rank 0 makes a unique id,
/// one call of `all_gather` in each rank hands it to the others, and all join with it. Waits for all ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_comm_bootstrap(
    context: *const pushgate_context,
    rank: u32,
    ranks: u32,
    all_gather: pushgate_all_gather,
    user: *mut c_void,
    comm: *mut *mut pushgate_comm,
) -> c_int {
    call(|| {
        // SAFETY: the header's rules for pointers, which the program keeps.
        unsafe {
            create(context, comm, |c| {
                let all_gather =
                    all_gather.ok_or_else(|| Failure::argument("all_gather", "NULL, expected a function"))?;
                Ok(Comm::bootstrap(c, &Exchange { rank, ranks, all_gather, user })?)
            })
        }
    })
}

/// Makes a communicator of `ranks` ranks inside this process, all on one context: for tests, and for programs whose ranks are
/// threads.
///
/// @param comms  `ranks` places. Each gets the communicator of one rank; after an error they are unchanged.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_comm_local(
    context: *const pushgate_context,
    ranks: u32,
    comms: *mut *mut pushgate_comm,
) -> c_int {
    call(|| {
        let context = table::get::<Context>(context)?;
        // SAFETY: the header's rules for pointers, which the program keeps.
        let _first = unsafe { Out::new("comms", comms)? };
        let made = Comm::local(&context, ranks)?;
        for (i, comm) in made.into_iter().enumerate() {
            let handle = table::open(CommObject { comm, _context: context.clone() });
            // SAFETY: not NULL and aligned, checked above; there are `ranks` places, by the header's rules.
            unsafe { comms.add(i).write(handle) };
        }
        Ok(())
    })
}

/// Closes a communicator without open queue pairs. The other ranks see that this rank left. NULL is no error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_comm_close(comm: *mut pushgate_comm) -> c_int {
    call(|| table::close::<CommObject>(comm))
}

/// This rank's number, from 0, and the number of ranks. Either place may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_comm_rank(
    comm: *const pushgate_comm,
    rank: *mut u32,
    ranks: *mut u32,
) -> c_int {
    call(|| {
        let object = table::get::<CommObject>(comm)?;
        for (name, at, value) in [("rank", rank, object.comm.rank()), ("ranks", ranks, object.comm.size())] {
            if !at.is_null() {
                // SAFETY: the header's rules for pointers, which the program keeps.
                unsafe { Out::new(name, at)? }.put(value);
            }
        }
        Ok(())
    })
}

/// The transport of queue pairs with a rank: PUSHGATE_TRANSPORT_*.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_comm_transport(
    comm: *const pushgate_comm,
    peer: u32,
    transport: *mut u32,
) -> c_int {
    call(|| {
        let object = table::get::<CommObject>(comm)?;
        // SAFETY: the header's rules for pointers, which the program keeps.
        let out = unsafe { Out::new("transport", transport)? };
        out.put(match object.comm.transport(peer)? {
            Transport::Local => PUSHGATE_TRANSPORT_LOCAL,
            Transport::Verbs => PUSHGATE_TRANSPORT_VERBS,
            Transport::Tcp => PUSHGATE_TRANSPORT_TCP,
            other => {
                let why = format!("this interface has no number for the transport {other}");
                return Err(Failure::new(PUSHGATE_E_INTERNAL, why));
            }
        });
        Ok(())
    })
}

/// Exchanges bytes between all ranks, as the keys of regions. A collective: every rank gives as many bytes.
///
/// After PUSHGATE_E_TIMED_OUT the call may be repeated with the same bytes, and goes on where it stopped.
///
/// @param bytes  This rank's `size` bytes.
/// @param all    Gets every rank's bytes in the order of ranks.
/// @param room   The size of `all`: `size` times the number of ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_comm_all_gather(
    comm: *const pushgate_comm,
    bytes: *const std::ffi::c_void,
    size: usize,
    all: *mut std::ffi::c_void,
    room: usize,
) -> c_int {
    call(|| {
        let object = table::get::<CommObject>(comm)?;
        // SAFETY: the header's rules for pointers, which the program keeps.
        let given = unsafe { self::bytes("bytes", bytes.cast(), size)? };
        let ranks = object.comm.size() as usize;
        if size.checked_mul(ranks) != Some(room) {
            let why = format!("{room} bytes, expected {size} times {ranks} ranks");
            return Err(Failure::argument("room", why));
        }
        // A program may have its bytes in `all` already; they are out of there before it is written to.
        let given = given.to_vec();
        // SAFETY: as above.
        let into = unsafe { bytes_mut("all", all.cast(), room)? };
        for (rank, theirs) in object.comm.all_gather(&given)?.iter().enumerate() {
            if theirs.len() != size {
                let why = format!("rank {rank} gave {} bytes, this rank {size}", theirs.len());
                return Err(Failure::new(PUSHGATE_E_MISMATCH, why));
            }
            into[rank * size..][..size].copy_from_slice(theirs);
        }
        Ok(())
    })
}

/// Waits until every rank has called pushgate_comm_barrier. A collective; after PUSHGATE_E_TIMED_OUT it may be called again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_comm_barrier(comm: *const pushgate_comm) -> c_int {
    call(|| Ok(table::get::<CommObject>(comm)?.comm.barrier()?))
}

/// Returns PUSHGATE_E_PEER_LOST once a rank has been lost.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_comm_check(comm: *const pushgate_comm) -> c_int {
    call(|| Ok(table::get::<CommObject>(comm)?.comm.check()?))
}

/// Ends all queue pairs of this rank with PUSHGATE_E_ABORTED, here and at their peers: for a rank that gives up, so that the others
/// need not wait until their timeouts.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_comm_abort(comm: *const pushgate_comm) -> c_int {
    call(|| {
        table::get::<CommObject>(comm)?.comm.abort();
        Ok(())
    })
}
