//! A barrier of the ranks of a host: a counter in a file that all of them map. A microsecond, where a message by way of
//! pipes would take as long as a small collective.

use std::fs::{File, OpenOptions};
use std::path::Path;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

const BYTES: usize = 4096;

pub struct Barrier {
    page: NonNull<AtomicU64>,
    ranks: u64,
    /// How often this rank has met the others.
    met: u64,
    timeout: Duration,
}

impl Barrier {
    /// Makes the file.
    pub fn make(path: &Path) -> Result<()> {
        let file = File::create_new(path).with_context(|| format!("making {}", path.display()))?;
        file.set_len(BYTES as u64).with_context(|| format!("making {}", path.display()))
    }

    /// Maps the file. `timeout`: how long a rank waits for the others.
    pub fn open(path: &Path, ranks: u32, timeout: Duration) -> Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path);
        let file = file.with_context(|| format!("opening {}", path.display()))?;
        // SAFETY: a new mapping at an address that the kernel picks.
        let page = unsafe {
            mmap(null_mut(), BYTES, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, 0)
        };
        let page = page.with_context(|| format!("mapping {}", path.display()))?;
        let page = NonNull::new(page.cast()).context("a mapping at address 0")?;
        Ok(Self { page, ranks: ranks.into(), met: 0, timeout })
    }

    /// Waits for all ranks.
    pub fn meet(&mut self) -> Result<()> {
        // SAFETY: mapped until the drop, page-aligned; all processes use this word as an atomic.
        let arrived = unsafe { self.page.as_ref() };
        self.met += 1;
        arrived.fetch_add(1, Ordering::AcqRel);
        let start = Instant::now();
        while arrived.load(Ordering::Acquire) < self.met * self.ranks {
            if start.elapsed() > self.timeout {
                bail!("waiting for the other ranks for {} s", self.timeout.as_secs_f32());
            }
            // There may be fewer cores than ranks.
            std::thread::yield_now();
        }
        Ok(())
    }
}

impl Drop for Barrier {
    fn drop(&mut self) {
        // SAFETY: mapped by `open`, used no more.
        let _ = unsafe { munmap(self.page.as_ptr().cast(), BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_meet_as_often_as_they_like_and_nobody_waits_for_ever() {
        let path = std::env::temp_dir().join(format!("pushgate-barrier-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        Barrier::make(&path).unwrap();
        let long = Duration::from_secs(60);
        let count = AtomicU64::new(0);
        std::thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| {
                    let mut barrier = Barrier::open(&path, 3, long).unwrap();
                    for turn in 1..=100 {
                        count.fetch_add(1, Ordering::Relaxed);
                        barrier.meet().unwrap();
                        assert_eq!(count.load(Ordering::Relaxed), 3 * turn);
                        barrier.meet().unwrap();
                    }
                });
            }
        });
        std::fs::remove_file(&path).unwrap();
        Barrier::make(&path).unwrap();
        let alone = Barrier::open(&path, 2, Duration::from_millis(1)).unwrap().meet().unwrap_err();
        assert!(alone.to_string().contains("waiting for the other ranks"), "{alone}");
        std::fs::remove_file(&path).unwrap();
    }
}
