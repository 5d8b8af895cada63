//! Receiver-not-ready answers as the RDMA port counts them: what the transport
//! saw, whatever our own counters say.

use std::path::{Path, PathBuf};
use std::time::Duration;

use pushgate::Context;

/// Those that a driver has. mlx5 has the last two, soft-RoCE the others.
const COUNTERS: [&str; 5] =
    ["send_rnr_err", "rcvd_rnr_err", "retry_rnr_exceeded_err", "rnr_nak_retry_err", "out_of_buffer"];

/// The counters of ports, and what they were when last looked at.
pub struct Rnr {
    files: Vec<PathBuf>,
    lifespan: Duration,
    last: u64,
}

impl Rnr {
    /// Opens the counters of the ports that queue pairs use. The error is a sentence.
    pub fn open(context: &Context) -> Result<Self, String> {
        let class = Path::new("/sys/class/infiniband");
        let (devices, port) =
            (context.rdma_devices().map_err(|e| e.to_string())?, context.settings().ib_port);
        let each = devices.iter().map(|device| Rnr::open_at(class, device, port));
        let mut all = each.collect::<Result<Vec<_>, _>>()?;
        let files = all.iter_mut().flat_map(|one| std::mem::take(&mut one.files)).collect();
        let lifespan = all.iter().map(|one| one.lifespan).max().unwrap_or_default();
        let last = all.iter().fold(0, |sum: u64, one| sum.wrapping_add(one.last));
        Ok(Rnr { files, lifespan, last })
    }

    fn open_at(class: &Path, device: &str, port: u32) -> Result<Self, String> {
        let folder = class.join(device).join("ports").join(port.to_string()).join("hw_counters");
        let files: Vec<_> = COUNTERS.iter().map(|c| folder.join(c)).filter(|f| f.is_file()).collect();
        if files.is_empty() {
            return Err(format!("{} has none of {}", folder.display(), COUNTERS.join(", ")));
        }
        // For this many milliseconds the kernel answers with what it read before.
        let lifespan = std::fs::read_to_string(folder.join("lifespan")).ok();
        let lifespan = lifespan.and_then(|s| s.trim().parse().ok()).unwrap_or(10).min(1000);
        let mut rnr = Rnr { files, lifespan: Duration::from_millis(lifespan + 1), last: 0 };
        rnr.increase()?;
        Ok(rnr)
    }

    /// How far the counters grew since the last call, or since they were opened.
    pub fn increase(&mut self) -> Result<u64, String> {
        std::thread::sleep(self.lifespan);
        let mut sum = 0u64;
        for file in &self.files {
            let text = std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
            let count = text.trim().parse::<u64>().map_err(|e| format!("{}: {e}", file.display()))?;
            sum = sum.wrapping_add(count);
        }
        Ok(sum.wrapping_sub(std::mem::replace(&mut self.last, sum)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rnr_is_what_the_ports_counters_grew_by() {
        let class = std::env::temp_dir().join(format!("pushgate-rnr-{}", std::process::id()));
        let put = |path: &str, text: &str| {
            let path = class.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        put("a0/ports/1/state", "4: ACTIVE\n");
        put("rxe0/ports/1/hw_counters/lifespan", "1\n");
        put("rxe0/ports/1/hw_counters/rcvd_rnr_err", "5\n");
        put("rxe0/ports/1/hw_counters/send_rnr_err", "7\n");
        put("rxe0/ports/1/hw_counters/sent_pkts", "99\n");
        let mut rnr = Rnr::open_at(&class, "rxe0", 1).unwrap();
        assert_eq!(rnr.increase(), Ok(0), "what was there before does not count");
        put("rxe0/ports/1/hw_counters/rcvd_rnr_err", "8\n");
        put("rxe0/ports/1/hw_counters/send_rnr_err", "9\n");
        assert_eq!((rnr.increase(), rnr.increase()), (Ok(5), Ok(0)));
        for (device, port) in [("rxe0", 2), ("a0", 1)] {
            let e = Rnr::open_at(&class, device, port).err().unwrap();
            assert!(e.contains("has none of send_rnr_err"), "{e}");
        }
        std::fs::remove_dir_all(&class).unwrap();
        assert!(rnr.increase().is_err() && Rnr::open_at(&class, "rxe0", 1).is_err());
    }
}
