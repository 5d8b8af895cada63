//! Users and groups of the system: which of them a proxy admits, and their numbers by their names.

use std::collections::BTreeSet;
use std::ffi::{CString, c_char, c_int};
use std::io;
use std::mem::MaybeUninit;
use std::ptr;

/// Who may use a proxy, besides the proxy's own user and root.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Users {
    /// Nobody else.
    #[default]
    Own,
    /// Users by their numbers, and all users of groups by theirs.
    Some {
        /// Users.
        users: BTreeSet<u32>,
        /// Groups. A user's own group counts, and so do the other groups of the user's process.
        groups: BTreeSet<u32>,
    },
    /// Every user of the host.
    Any,
}

/// Whether a text may be parsed by [`Users::find`]: `own`, `any`, or names and numbers of users, and of groups with `@` before
/// them, with commas between them.
pub fn is_list(text: &str) -> bool {
    let name = |entry: &str| is_name(entry.strip_prefix('@').unwrap_or(entry));
    ["own", "any"].contains(&text) || text.split(',').all(|e| name(e) && !["own", "any"].contains(&e))
}

/// Whether a text may be a user's name or number.
pub fn is_name(text: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"._-$".contains(&b);
    (1..=255).contains(&text.len()) && text.bytes().all(allowed) && !text.starts_with('-')
}

impl Users {
    /// Reads a list that [`is_list`], and finds the numbers of its names.
    pub fn find(text: &str) -> io::Result<Users> {
        match text {
            "own" => return Ok(Users::Own),
            "any" => return Ok(Users::Any),
            _ => {}
        }
        let (mut users, mut groups) = (BTreeSet::new(), BTreeSet::new());
        for entry in text.split(',') {
            match entry.strip_prefix('@') {
                Some(name) => groups.insert(number_of(name, group)?),
                None => users.insert(number_of(entry, user)?),
            };
        }
        Ok(Users::Some { users, groups })
    }

    /// Whether others than the proxy's own user and root are admitted.
    pub fn others(&self) -> bool {
        *self != Users::Own
    }

    /// Whether a user with these groups is among those that are named.
    pub(crate) fn names(&self, uid: u32, groups: impl IntoIterator<Item = u32>) -> bool {
        match self {
            Users::Own => false,
            Users::Any => true,
            Users::Some { users, groups: all } => {
                users.contains(&uid) || groups.into_iter().any(|group| all.contains(&group))
            }
        }
    }
}

/// The user with this name or number.
pub fn find_user(name: &str) -> io::Result<u32> {
    number_of(name, user)
}

/// The number that a text is, or else what `look` finds for the name.
fn number_of(name: &str, look: fn(&str) -> io::Result<u32>) -> io::Result<u32> {
    match name.bytes().all(|b| b.is_ascii_digit()) {
        // The largest number stands for no user in the kernel's calls.
        true => name.parse().ok().filter(|number| *number != u32::MAX).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidInput, format!("{name} is no user's number"))
        }),
        false => look(name),
    }
}

/// Calls one of the C library's functions that find an entry by its name, which may come from any source of the system's (NSS).
/// The function has the name, the place of the entry, room for text, the room's size, and the place of what it finds; `number`
/// is the entry's number.
fn look<E>(
    what: &str,
    name: &str,
    function: unsafe extern "C" fn(*const c_char, *mut E, *mut c_char, usize, *mut *mut E) -> c_int,
    number: impl Fn(&E) -> u32,
) -> io::Result<u32> {
    let none = || io::Error::new(io::ErrorKind::NotFound, format!("this host knows no {what} `{name}`"));
    let text = CString::new(name).map_err(|_| none())?;
    let mut room = 1 << 10;
    loop {
        let mut entry = MaybeUninit::<E>::uninit();
        let (mut strings, mut found) = (vec![0 as c_char; room], ptr::null_mut());
        // SAFETY: the name ends with a zero byte. The call writes an entry, at most `room` bytes of text, and the pointer
        // `found`, all of which outlive the call.
        let error =
            unsafe { function(text.as_ptr(), entry.as_mut_ptr(), strings.as_mut_ptr(), room, &mut found) };
        match error {
            0 if found.is_null() => return Err(none()),
            // SAFETY: the call has found an entry, which it wrote.
            0 => return Ok(number(unsafe { entry.assume_init_ref() })),
            libc::EINTR => {}
            // A group may have many members.
            libc::ERANGE if room < 1 << 24 => room *= 4,
            e => {
                let e = io::Error::from_raw_os_error(e);
                return Err(io::Error::new(e.kind(), format!("looking for the {what} `{name}`: {e}")));
            }
        }
    }
}

fn user(name: &str) -> io::Result<u32> {
    look("user", name, libc::getpwnam_r, |entry| entry.pw_uid)
}

fn group(name: &str) -> io::Result<u32> {
    look("group", name, libc::getgrnam_r, |entry| entry.gr_gid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_of_users_and_groups_are_found() {
        assert_eq!(find_user("root").unwrap(), 0);
        assert_eq!(find_user("65001").unwrap(), 65001);
        let found = Users::find("root,65001,@root,@65002").unwrap();
        assert_eq!(found, Users::Some { users: [0, 65001].into(), groups: [0, 65002].into() });
        assert_eq!((Users::find("own").unwrap(), Users::find("any").unwrap()), (Users::Own, Users::Any));
        let e = Users::find("65001,@no-such-group-here").unwrap_err().to_string();
        assert_eq!(e, "this host knows no group `no-such-group-here`");
        let e = find_user("no-such-user-here").unwrap_err().to_string();
        assert_eq!(e, "this host knows no user `no-such-user-here`");
        for number in ["4294967295", "4294967296"] {
            assert!(find_user(number).unwrap_err().to_string().contains("no user's number"));
        }
    }

    #[test]
    fn a_list_has_names_numbers_and_groups_and_its_words_stand_alone() {
        for text in ["own", "any", "alice", "1000", "@gpu", "alice,1000,@gpu,@44", "svc$", "a.b-c_d"] {
            assert!(is_list(text), "{text}");
        }
        for text in ["", ",", "a,", "@", "a b", "own,a", "a,any", "-a", "@-a", "a/b", "a:b", "@@a"] {
            assert!(!is_list(text), "{text}");
        }
    }

    #[test]
    fn p8_a_user_is_named_by_number_or_by_any_group_and_otherwise_not() {
        let some = Users::Some { users: [1000].into(), groups: [44].into() };
        assert!(some.names(1000, [5]) && some.names(1001, [5, 44]));
        assert!(!some.names(1001, [5]) && !some.names(44, [1000]));
        assert!(Users::Any.names(7, []) && !Users::Own.names(7, [44]));
        assert!(Users::Any.others() && some.others() && !Users::Own.others());
    }
}
