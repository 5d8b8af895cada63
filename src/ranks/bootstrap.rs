//! A way of the program's own by which ranks exchange a few bytes before they have a communicator: MPI, torch, a file.

use std::io;

use super::UniqueId;
use super::size::check_rank;
use crate::comm::Comm;
use crate::context::Context;
use crate::error::{Error, Result};

/// How the ranks of a program exchange bytes before they have a communicator.
///
/// ```no_run
/// # use std::io;
/// # struct Mpi;
/// # impl Mpi { fn rank(&self) -> u32 { 0 } fn size(&self) -> u32 { 1 } fn allgather(&self, _: &[u8]) -> Vec<u8> { Vec::new() } }
/// impl pushgate::Bootstrap for Mpi {
///     fn rank(&self) -> u32 {
///         Mpi::rank(self)
///     }
///     fn size(&self) -> u32 {
///         Mpi::size(self)
///     }
///     fn all_gather(&self, bytes: &[u8]) -> io::Result<Vec<Vec<u8>>> {
///         Ok(self.allgather(bytes).chunks_exact(bytes.len()).map(<[u8]>::to_vec).collect())
///     }
/// }
/// ```
pub trait Bootstrap {
    /// This rank's number, from 0.
    fn rank(&self) -> u32;

    /// How many ranks there are.
    fn size(&self) -> u32;

    /// Exchanges bytes between all ranks: returns every rank's bytes in the order of ranks. A collective, in which all ranks
    /// give equally many bytes, at least one. It should fail when a rank does not come.
    fn all_gather(&self, bytes: &[u8]) -> io::Result<Vec<Vec<u8>>>;
}

impl Comm {
    /// Joins a communicator whose ranks exchange what they need by a way of the program's own. A collective of that way's ranks.
    ///
    /// Rank 0 makes a [`UniqueId`], one [`Bootstrap::all_gather`] hands it to the others, and all join with it. The id is a
    /// secret: a program that has the id can join as a rank.
    ///
    /// # Errors
    /// Those of [`UniqueId::new`] at rank 0, and [`Error::Mismatch`] at the others then; those of [`Comm::connect_with`]; and
    /// [`Error::Io`] with what the program's own exchange said.
    pub fn bootstrap(context: &Context, ranks: &dyn Bootstrap) -> Result<Comm> {
        context.here()?;
        let (rank, size) = (ranks.rank(), ranks.size());
        check_rank(rank, size)?;
        let made = (rank == 0).then(|| UniqueId::new(context));
        // A rank 0 without an id takes part as well: the others would wait for it.
        let given = match &made {
            Some(Ok(id)) => id.to_bytes(),
            _ => [0; UniqueId::BYTES],
        };
        let exchanged = ranks.all_gather(&given);
        let all = exchanged.map_err(Error::io("the program's own exchange between its ranks")).inspect_err(
            |_| {
                if let Some(Ok(id)) = &made {
                    // Nobody will come to its socket.
                    let _ = context.inner.listeners.take(id);
                }
            },
        )?;
        let id = match made {
            Some(made) => made?,
            None => {
                let wrong = |reason: String| Error::Mismatch { rank: 0, reason };
                let first = all.first().filter(|_| all.len() == size as usize);
                let first =
                    first.ok_or_else(|| wrong(format!("{} ranks' bytes came of {size}", all.len())))?;
                if first.iter().all(|byte| *byte == 0) {
                    return Err(wrong("it could not make a unique id; its own output says why".to_owned()));
                }
                UniqueId::from_bytes(first)?
            }
        };
        Comm::connect_with(context, &id, rank, size)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Barrier, Mutex};

    use super::*;
    use crate::Settings;

    /// Ranks that are threads, and meet in a table.
    struct Table {
        barrier: Barrier,
        bytes: Mutex<Vec<Vec<u8>>>,
    }

    struct Rank<'a>(&'a Table, u32, u32);

    impl Bootstrap for Rank<'_> {
        fn rank(&self) -> u32 {
            self.1
        }

        fn size(&self) -> u32 {
            self.2
        }

        fn all_gather(&self, bytes: &[u8]) -> io::Result<Vec<Vec<u8>>> {
            self.0.bytes.lock().unwrap()[self.1 as usize] = bytes.to_vec();
            self.0.barrier.wait();
            Ok(self.0.bytes.lock().unwrap().clone())
        }
    }

    fn context(more: &[(&str, &str)]) -> Context {
        let mut settings = Settings::default();
        for (name, value) in [("device", "cpu"), ("host", "127.0.0.1")].iter().chain(more) {
            settings.set(name, value).unwrap();
        }
        Context::builder().settings(settings).build().unwrap()
    }

    fn run<T: Send>(size: u32, rank: impl Fn(Rank<'_>) -> T + Sync) -> Vec<T> {
        let bytes = Mutex::new(vec![Vec::new(); size as usize]);
        let (table, rank) = (Table { barrier: Barrier::new(size as usize), bytes }, &rank);
        std::thread::scope(|s| {
            let table = &table;
            let ranks: Vec<_> = (0..size).map(|r| s.spawn(move || rank(Rank(table, r, size)))).collect();
            ranks.into_iter().map(|r| r.join().unwrap()).collect()
        })
    }

    #[test]
    fn ranks_meet_by_an_exchange_of_the_programs_own() {
        let gathered = run(3, |how| {
            let context = context(&[]);
            let comm = Comm::bootstrap(&context, &how).unwrap();
            assert_eq!((comm.rank(), comm.size()), (how.1, 3));
            comm.all_gather(&[how.1 as u8]).unwrap()
        });
        assert!(gathered.iter().all(|all| *all == [[0], [1], [2]]));
        assert_eq!(run(1, |how| Comm::bootstrap(&context(&[]), &how).unwrap().size()), [1]);
    }

    #[test]
    fn p7_where_rank_0_makes_no_id_every_rank_is_told() {
        let errors = run(2, |how| {
            // No host has this address (RFC 5737), so no socket can have it.
            let context = context(&[("host", "192.0.2.1")]);
            Comm::bootstrap(&context, &how).err().unwrap()
        });
        assert!(errors[0].is_config(), "{}", errors[0]);
        assert!(matches!(errors[1], Error::Mismatch { rank: 0, .. }), "{}", errors[1]);
    }

    #[test]
    fn p8_an_exchange_that_returns_too_few_or_other_bytes_is_refused() {
        struct Wrong(Vec<Vec<u8>>);
        impl Bootstrap for Wrong {
            fn rank(&self) -> u32 {
                1
            }
            fn size(&self) -> u32 {
                2
            }
            fn all_gather(&self, _: &[u8]) -> io::Result<Vec<Vec<u8>>> {
                if self.0.is_empty() { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(self.0.clone()) }
            }
        }
        let context = context(&[]);
        let refused = |bytes: Vec<Vec<u8>>| Comm::bootstrap(&context, &Wrong(bytes)).err().unwrap();
        assert!(matches!(refused(Vec::new()), Error::Io { .. }));
        assert!(matches!(refused(vec![vec![1; 128]]), Error::Mismatch { rank: 0, .. }));
        assert!(refused(vec![vec![1; 128]; 2]).is_config());
        assert!(refused(vec![vec![1; 5]; 2]).is_config());
        run(1, |how| assert!(Comm::bootstrap(&context, &Rank(how.0, 1, 1)).err().unwrap().is_config()));
    }
}
