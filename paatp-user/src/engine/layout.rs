//! Which tables an object means, read from the object itself: one of another build would load without complaint.

use object::{Object, ObjectSection};
use paatp_common::layout::{LAYOUT, SECTION};
use sha2::{Digest, Sha256};

use super::error::EngineError;

/// Hexadecimal digits that tell one object from another in names of pins.
const BUILD_DIGITS: usize = 16;

/// The layout that an object was built for; none where it does not say.
#[must_use]
pub fn of_object(object: &[u8]) -> Option<u64> {
    let file = object::File::parse(object).ok()?;
    let data = file.section_by_name(SECTION)?.data().ok()?;
    Some(u64::from_le_bytes(data.try_into().ok()?))
}

/// Checks that an object means the tables of this program.
///
/// # Errors
/// If not.
pub fn check(object: &[u8]) -> Result<(), EngineError> {
    match of_object(object) {
        Some(LAYOUT) => Ok(()),
        other => Err(EngineError::OtherBuild { object: other }),
    }
}

/// What tells one object from another of the same layout.
#[must_use]
pub fn build(object: &[u8]) -> String {
    let digest = Sha256::digest(object);
    digest.iter().take(BUILD_DIGITS / 2).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::OBJECT;

    #[test]
    fn objects_of_other_builds_are_refused() {
        assert_eq!(of_object(b"no ELF"), None);
        let refused = check(b"no ELF").err().map(|error| error.to_string()).unwrap_or_default();
        assert!(refused.contains(&format!("{LAYOUT:016x}")) && refused.contains("does not say"), "{refused}");
        if OBJECT.is_empty() {
            return;
        }
        assert_eq!(of_object(OBJECT), Some(LAYOUT));
        // The same object, had it been built from other tables.
        let mut other = OBJECT.to_vec();
        let place = other.windows(8).position(|bytes| bytes == LAYOUT.to_le_bytes());
        let Some(place) = place else { panic!("the layout is not in the object") };
        other[place] ^= 1;
        let refused = check(&other).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(refused.contains(&format!("{:016x}", LAYOUT ^ 1)), "{refused}");
        assert_ne!(build(&other), build(OBJECT));
        assert_eq!(build(&other).len(), BUILD_DIGITS);
    }
}
