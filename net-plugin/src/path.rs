//! How a message leaves: in its WQE, by way of the window, or from where it lies.

use pushgate_driver_shim::abi;

use crate::comm::Mr;
use crate::error::{Code, Failure, Result};

/// See the module's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// It fits into the WQE.
    Inline,
    /// We copy it into the window.
    Push,
    /// The WQE names a stretch of a region; nobody copies it here.
    Region { key: u32, offset: u64 },
    /// Too long for the window at once: in slices.
    Slices,
}

/// Chooses for `size` bytes at `data`, registered as `mr`. `regions`: the queue pair
/// sends from regions. `whole`: what goes through the window at once.
pub fn choose(data: usize, size: usize, mr: Option<&Mr>, regions: bool, whole: usize) -> Result<Path> {
    if size > crate::props::MAX_BYTES {
        let text = format!(
            "a message of {} bytes, at most {} (maxP2pBytes)",
            size as isize,
            crate::props::MAX_BYTES
        );
        return Err(Failure::new(Code::Usage, text));
    }
    let offset = match mr {
        Some(mr) => Some((mr.key, mr.offset(data, size)?)),
        None => None,
    };
    if size <= abi::PUSHGATE_INLINE_SEND as usize {
        return Ok(Path::Inline);
    }
    Ok(match offset {
        Some((key, offset)) if regions => Path::Region { key, offset },
        _ if size <= whole => Path::Push,
        _ => Path::Slices,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_follows_size_and_registration() {
        let mr = Mr { key: 9, address: 0x1000, bytes: 1 << 20 };
        let choose = |size, mr: Option<&Mr>, regions| choose(0x1100, size, mr, regions, 65536).unwrap();
        assert_eq!(choose(0, None, true), Path::Inline);
        assert_eq!(choose(40, Some(&mr), true), Path::Inline);
        assert_eq!(choose(41, Some(&mr), true), Path::Region { key: 9, offset: 0x100 });
        assert_eq!(choose(41, None, true), Path::Push);
        assert_eq!(choose(65536, Some(&mr), false), Path::Push);
        assert_eq!(choose(65537, Some(&mr), false), Path::Slices);
    }

    #[test]
    fn what_leaves_its_registration_is_refused() {
        let mr = Mr { key: 9, address: 0x1000, bytes: 100 };
        for (data, size) in [(0xfff, 1), (0x1000, 101), (0x1064, 1), (usize::MAX, 2)] {
            let e = choose(data, size, Some(&mr), true, 65536).unwrap_err();
            assert_eq!(e.code, Code::Usage, "{e}");
        }
        assert!(choose(0, usize::MAX, None, true, 64).unwrap_err().text.contains("-1 bytes"));
    }
}
