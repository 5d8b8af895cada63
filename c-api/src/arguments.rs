//! Arguments as C passes them, checked before they are used.

use std::ffi::{CStr, c_char};

use crate::boundary::{Failure, Result};

/// A text: not NULL, and UTF-8.
///
/// # Safety
/// `text` is NULL or a string that ends with NUL and stays as it is for the call.
pub(crate) unsafe fn text<'a>(name: &str, text: *const c_char) -> Result<&'a str> {
    if text.is_null() {
        return Err(Failure::argument(name, "NULL, expected a text"));
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| Failure::argument(name, "bytes that are no UTF-8"))
}

/// Bytes that the call reads. NULL only with a length of 0.
///
/// # Safety
/// The `size` bytes at `bytes` can be read and stay as they are for the call.
pub(crate) unsafe fn bytes<'a>(name: &str, bytes: *const u8, size: usize) -> Result<&'a [u8]> {
    check_range(name, bytes, size)?;
    // SAFETY: not NULL and no longer than memory can be, checked above; the rest is the caller's promise.
    Ok(if size == 0 { &[] } else { unsafe { std::slice::from_raw_parts(bytes, size) } })
}

/// Bytes that the call writes. NULL only with a length of 0.
///
/// # Safety
/// The `size` bytes at `bytes` can be written, and nothing else accesses them during the call.
pub(crate) unsafe fn bytes_mut<'a>(name: &str, bytes: *mut u8, size: usize) -> Result<&'a mut [u8]> {
    check_range(name, bytes, size)?;
    if size == 0 {
        return Ok(&mut []);
    }
    // What C hands over need not be initialised, and a slice must be.
    // SAFETY: not NULL and no longer than memory can be, checked above; the rest is the caller's promise.
    Ok(unsafe {
        std::ptr::write_bytes(bytes, 0, size);
        std::slice::from_raw_parts_mut(bytes, size)
    })
}

fn check_range(name: &str, at: *const u8, size: usize) -> Result<()> {
    if at.is_null() && size > 0 {
        return Err(Failure::argument(name, format_args!("NULL, expected {size} bytes")));
    }
    if size > isize::MAX as usize || at.addr().checked_add(size).is_none() {
        return Err(Failure::argument(name, format_args!("{size} bytes, more than memory can hold")));
    }
    Ok(())
}

/// `count` values that the call reads. NULL only with a count of 0.
///
/// # Safety
/// The values at `at` can be read and stay as they are for the call.
pub(crate) unsafe fn values<'a, T: Copy>(name: &str, at: *const T, count: usize) -> Result<&'a [T]> {
    let size = count.checked_mul(size_of::<T>());
    let size = size.ok_or_else(|| Failure::argument(name, format_args!("{count} of them are too many")))?;
    check_range(name, at.cast(), size)?;
    aligned(name, at)?;
    // SAFETY: not NULL, aligned, no longer than memory can be, checked above; the rest is the caller's promise.
    Ok(if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(at, count) } })
}

fn aligned<T>(name: &str, at: *const T) -> Result<()> {
    match at.is_aligned() {
        true => Ok(()),
        false => Err(Failure::argument(name, format_args!("{at:p} is not aligned to {}", align_of::<T>()))),
    }
}

/// A place for one result.
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Not NULL, and aligned.
    ///
    /// # Safety
    /// `at` is NULL or can be written to during the call.
    pub(crate) unsafe fn new(name: &str, at: *mut T) -> Result<Self> {
        if at.is_null() {
            return Err(Failure::argument(name, "NULL, expected a place for the result"));
        }
        aligned(name, at)?;
        Ok(Out(at))
    }

    pub(crate) fn put(&self, value: T) {
        // SAFETY: not NULL and aligned, checked in `new`, whose caller promised the rest. What lay there is not dropped: it
        // need not be initialised.
        unsafe { self.0.write(value) }
    }
}

impl<T> Out<*mut T> {
    /// A place for a handle, which is NULL until the call has succeeded.
    ///
    /// # Safety
    /// As for [`Out::new`].
    pub(crate) unsafe fn handle(name: &str, at: *mut *mut T) -> Result<Self> {
        // SAFETY: the caller's promise.
        let out = unsafe { Self::new(name, at)? };
        out.put(std::ptr::null_mut());
        Ok(out)
    }
}

/// A structure of options. Its first member is a `size_t size`, which the program sets to the structure's size as it was
/// compiled with.
///
/// # Safety
/// The structure is `repr(C)`, begins with that member, has no padding, and each pattern of bits is a value of it.
pub(crate) unsafe trait Options: Copy {
    /// The size that the first release with the structure has.
    const LEAST: usize;
}

/// Options as the program passes them: with a newer library what an older program does not know is 0, and with an older library
/// what a newer program sets must be 0. `None`: NULL.
///
/// # Safety
/// `at` is NULL, or as many bytes as the member `size` says can be read and stay as they are for the call.
pub(crate) unsafe fn options<T: Options>(name: &str, at: *const T) -> Result<Option<T>> {
    if at.is_null() {
        return Ok(None);
    }
    aligned(name, at)?;
    // SAFETY: not NULL and aligned, checked above; the first member is the size, by the trait's promise.
    let size = unsafe { at.cast::<usize>().read() };
    // No structure of any release is as large as a page.
    if size < T::LEAST || size > 4096 {
        let why = format!("its member size is {size}, expected sizeof, {}", size_of::<T>());
        return Err(Failure::argument(name, why));
    }
    // SAFETY: the caller's promise, for the size that the structure states.
    let given = unsafe { bytes(name, at.cast(), size)? };
    let (known, beyond) = given.split_at(size.min(size_of::<T>()));
    if beyond.iter().any(|byte| *byte != 0) {
        let why = "a member that this release of libpushgate does not know is not 0";
        return Err(Failure::argument(name, why));
    }
    let mut options = std::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: at most the structure's size is copied, into the structure; each pattern of bits, and so the zeros behind it, is
    // a value, by the trait's promise.
    Ok(Some(unsafe {
        std::ptr::copy_nonoverlapping(known.as_ptr(), options.as_mut_ptr().cast::<u8>(), known.len());
        options.assume_init()
    }))
}

/// Refuses flags that there are none of.
pub(crate) fn flags(name: &str, flags: u32, known: u32) -> Result<()> {
    match flags & !known {
        0 => Ok(()),
        unknown => Err(Failure::argument(name, format_args!("there is no flag {unknown:#x}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codes::PUSHGATE_E_ARGUMENT;

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Old {
        size: usize,
        a: u64,
    }

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct New {
        size: usize,
        a: u64,
        b: u64,
    }

    // SAFETY: integers without padding, the size first.
    unsafe impl Options for Old {
        const LEAST: usize = 16;
    }

    // SAFETY: as above.
    unsafe impl Options for New {
        const LEAST: usize = 16;
    }

    #[test]
    fn options_of_another_release_are_taken_where_nothing_unknown_is_set() {
        let old = Old { size: 16, a: 3 };
        // SAFETY: the library reads no more than `size` bytes.
        let taken = unsafe { options("o", std::ptr::from_ref(&old).cast::<New>()) };
        assert_eq!(taken.unwrap(), Some(New { size: 16, a: 3, b: 0 }));
        let new = New { size: 24, a: 3, b: 0 };
        // SAFETY: as above.
        let taken = unsafe { options("o", std::ptr::from_ref(&new).cast::<Old>()) };
        assert_eq!(taken.unwrap(), Some(Old { size: 24, a: 3 }));
        let new = New { b: 1, ..new };
        // SAFETY: as above.
        let refused = unsafe { options("o", std::ptr::from_ref(&new).cast::<Old>()) };
        assert_eq!(refused.unwrap_err().code, PUSHGATE_E_ARGUMENT);
    }

    #[test]
    fn options_of_a_size_that_can_not_be_are_refused() {
        for size in [0, 8, 15, 4097, usize::MAX] {
            // SAFETY: the library reads nothing behind the size that it refuses.
            let refused = unsafe { options("o", &Old { size, a: 0 }) };
            assert!(refused.unwrap_err().message.contains("expected sizeof, 16"), "{size}");
        }
        // SAFETY: NULL is allowed.
        assert_eq!(unsafe { options::<Old>("o", std::ptr::null()) }.unwrap(), None);
    }

    #[test]
    fn a_range_that_can_not_be_is_refused() {
        let byte = 7u8;
        // SAFETY: nothing is read of what is refused.
        unsafe {
            assert!(bytes("b", std::ptr::null(), 1).is_err());
            assert!(bytes("b", &byte, usize::MAX).is_err());
            assert!(values("v", std::ptr::without_provenance::<u64>(0x1001), 1).is_err());
            assert!(values("v", std::ptr::without_provenance::<u64>(0x1000), usize::MAX / 4).is_err());
            assert_eq!(bytes("b", &byte, 1).unwrap(), [7]);
            assert!(bytes("b", std::ptr::null(), 0).unwrap().is_empty());
        }
    }
}
